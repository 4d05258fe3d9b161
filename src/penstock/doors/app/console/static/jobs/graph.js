// Jobs that come after each other, as a graph: parents on the left, what waits for them on the right.

import { Drawing } from "../ui.js";
import { html } from "../vendor/preact-htm.js";

const BOX = { width: 168, height: 44 };
const GAP = { x: 56, y: 14 };
const MARGIN = 2;

/** Give each job of a graph its column (after all of its parents) and row. Jobs without relatives are left out. */
export function arrange(jobs) {
  const byId = new Map(jobs.map((job) => [job.id, job]));
  const parentsOf = (job) => Object.values(job.after ?? {}).filter((id) => byId.has(id));
  const related = new Set(jobs.flatMap((job) => (parentsOf(job).length ? [job.id, ...parentsOf(job)] : [])));
  const columns = new Map();
  const columnOf = (id, seen = new Set()) => {
    if (columns.has(id) || seen.has(id)) return columns.get(id) ?? 0;
    seen.add(id);
    const column = Math.max(-1, ...parentsOf(byId.get(id)).map((parent) => columnOf(parent, seen))) + 1;
    columns.set(id, column);
    return column;
  };
  const rows = [];
  const placed = new Map();
  for (const job of [...jobs].reverse().filter(({ id }) => related.has(id))) {
    const column = columnOf(job.id);
    rows[column] = (rows[column] ?? 0) + 1;
    placed.set(job.id, { job, x: MARGIN + column * (BOX.width + GAP.x), y: MARGIN + (rows[column] - 1) * (BOX.height + GAP.y) });
  }
  const edges = [...placed.values()].flatMap(({ job }) => parentsOf(job).map((parent) => [placed.get(parent), placed.get(job.id)]));
  return { boxes: [...placed.values()], edges };
}

export function Graph({ jobs, onChoose }) {
  const { boxes, edges } = arrange(jobs);
  if (!boxes.length) return null;
  const width = Math.max(...boxes.map(({ x }) => x)) + BOX.width + MARGIN;
  const height = Math.max(...boxes.map(({ y }) => y)) + BOX.height + MARGIN;
  const covers = boxes.map(({ job, x, y }) => ({
    key: job.id,
    x,
    y,
    ...BOX,
    label: `${job.tags?.[0] ?? shortId(job.id)}, ${job.status}. Details`,
    onClick: () => onChoose(job.id),
  }));
  return html`<section class="card stack" aria-label="Jobs that depend on each other">
    <h2>Jobs that depend on each other</h2>
    <${Drawing} width=${width} height=${height} label="Graph of jobs" covers=${covers} class="graph">
      ${edges.map(([from, to]) => html`<path class="edge" d=${edge(from, to)} />`)}
      ${boxes.map(
        ({ job, x, y }) => html`<g key=${job.id} class="job-box ${job.status}" transform="translate(${x} ${y})">
          <rect width=${BOX.width} height=${BOX.height} rx="8" />
          <circle cx="16" cy=${BOX.height / 2} r="4.5" />
          <text x="30" y="19" class="name">${job.tags?.[0] ?? shortId(job.id)}</text>
          <text x="30" y="34" class="fact">${job.status}${job.tags?.length ? ` · ${shortId(job.id)}` : ""}</text>
        </g>`,
      )}
    <//>
  </section>`;
}

function edge(from, to) {
  const [x1, y1] = [from.x + BOX.width, from.y + BOX.height / 2];
  const [x2, y2] = [to.x, to.y + BOX.height / 2];
  const bend = (x1 + x2) / 2;
  return `M${x1} ${y1} C${bend} ${y1} ${bend} ${y2} ${x2} ${y2}`;
}

/** Enough of an id to tell jobs apart. */
export const shortId = (id) => `…${id.slice(-6)}`;
