// The bundle has a limit: a page loads all of it before the first notebook opens.
import { readdirSync, statSync } from 'node:fs';
import { join } from 'node:path';

const LIMIT = 200 * 1024;
const directory = join(import.meta.dirname, '..', 'dist', 'static');

const files = readdirSync(directory).filter(name => name.endsWith('.js'));
const bytes = files.reduce((sum, name) => sum + statSync(join(directory, name)).size, 0);
console.log(`bundle: ${(bytes / 1024).toFixed(1)} KiB in ${files.length} files, of ${LIMIT / 1024} KiB allowed`);
process.exit(bytes > LIMIT ? 1 : 0);
