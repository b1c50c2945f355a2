/** Jobs of the server that no event reports. */

/** Milliseconds between two requests for a job. */
const POLL = 500;

interface IFollowed {
  id: string;
  ended: number | null;
}

/** Request a job until it has ended, but in a hidden tab not until that is shown.  Without a reply the job runs on. */
export async function followed<Job extends IFollowed>(
  job: Job,
  request: (id: string) => Promise<Job>,
  isHidden = () => document.hidden
): Promise<Job> {
  while (job.ended === null) {
    await new Promise(resolve => setTimeout(resolve, POLL));
    if (!isHidden()) {
      try {
        job = await request(job.id);
      } catch (error) {
        if (((error as { status?: number }).status ?? 500) < 500) {
          throw error;
        }
      }
    }
  }
  return job;
}
