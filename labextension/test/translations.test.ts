/** Every text of the front end is in every catalogue, with the same values in it; and no text is outside of them. */

import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import * as ts from 'typescript';

const SOURCES = join(__dirname, '..', 'src');
const LOCALES = join(__dirname, '..', '..', 'jupyter_gpu_ckpt', 'locale');
const METHODS = ['__', '_n', '_p', '_np'];

type Catalogue = Record<string, string[]>;

const files = readdirSync(SOURCES).map(name => {
  const text = readFileSync(join(SOURCES, name), 'utf-8');
  return ts.createSourceFile(name, text, ts.ScriptTarget.Latest, true, ts.ScriptKind.TSX);
});

function visit(node: ts.Node, see: (node: ts.Node) => void): void {
  see(node);
  node.forEachChild(child => visit(child, see));
}

function where(node: ts.Node): string {
  const file = node.getSourceFile();
  return `${file.fileName}:${file.getLineAndCharacterOfPosition(node.getStart()).line + 1}`;
}

/** The first argument of each call of a translation bundle, and whether the call has a plural. */
function texts(): Map<string, { plural: string | null; at: string }> {
  const found = new Map<string, { plural: string | null; at: string }>();
  for (const file of files) {
    visit(file, node => {
      if (!ts.isCallExpression(node) || !ts.isPropertyAccessExpression(node.expression)) {
        return;
      }
      const method = node.expression.name.text;
      if (METHODS.includes(method)) {
        const [first, second] = node.arguments;
        if (first === undefined || !ts.isStringLiteralLike(first)) {
          throw new Error(`${where(node)}: what is translated must be a literal`);
        }
        const plural = method === '_n' && second !== undefined && ts.isStringLiteralLike(second) ? second.text : null;
        found.set(first.text, { plural, at: where(node) });
      }
    });
  }
  return found;
}

function values(text: string): string[] {
  return [...new Set(text.match(/%\d/g) ?? [])].sort();
}

const locales = readdirSync(LOCALES);

test('there is German', () => {
  expect(locales).toContain('de_DE');
  expect(texts().size).toBeGreaterThan(100);
});

describe.each(locales)('%s', locale => {
  const path = join(LOCALES, locale, 'LC_MESSAGES', 'jupyter_gpu_ckpt.json');
  const { '': head, ...catalogue } = JSON.parse(readFileSync(path, 'utf-8')) as Catalogue & { '': object };

  test('has a head that JupyterLab understands', () => {
    expect(head).toMatchObject({ domain: 'jupyter_gpu_ckpt', language: locale.replace('_', '-') });
  });

  test('lacks no text and has none that is gone', () => {
    expect(Object.keys(catalogue).sort()).toEqual([...texts().keys()].sort());
  });

  test('has each text with the same values, and each plural', () => {
    for (const [text, { plural, at }] of texts()) {
      const translated = catalogue[text] ?? [];
      expect([at, translated.length]).toEqual([at, plural === null ? 1 : 2]);
      const originals = plural === null ? [text] : [text, plural];
      expect([at, translated.map(values)]).toEqual([at, originals.map(values)]);
      expect(translated.filter(each => each.trim() === '')).toEqual([]);
    }
  });
});

test('no element has a text that is not translated', () => {
  const found: string[] = [];
  const shown = ['title', 'label', 'placeholder', 'alt', 'aria-label', 'textContent', 'caption'];
  for (const file of files) {
    visit(file, node => {
      const isText = ts.isJsxText(node) && /\p{L}/u.test(node.text);
      const isAttribute =
        ts.isJsxAttribute(node) &&
        shown.includes(node.name.getText()) &&
        node.initializer !== undefined &&
        ts.isStringLiteral(node.initializer);
      const isProperty =
        ts.isPropertyAssignment(node) &&
        shown.includes(node.name.getText()) &&
        ts.isStringLiteralLike(node.initializer) &&
        /\p{L}/u.test(node.initializer.text);
      if (isText || isAttribute || isProperty) {
        found.push(`${where(node)}: ${node.getText().trim()}`);
      }
    });
  }
  expect(found).toEqual([]);
});
