// Answers: what the engine works on now, and what ended lately.

import { count, plural, seconds } from "../format.js";
import { Empty, IconButton } from "../ui.js";
import { html, useState } from "../vendor/preact-htm.js";
import { disk } from "./disk.js";
import { shortId } from "./graph.js";

const WORDS = { waiting_preempt: "waiting again", paused: "running" };
const FILTERS = {
  all: () => true,
  active: (row) => row.open,
  done: (row) => row.state === "done",
  failed: (row) => !row.open && row.state !== "done",
};

/** All jobs of a state as rows: open ones first, then those that ended last. */
export function rowsOf(state) {
  const open = Object.entries(state.jobs).map(([id, job]) => ({ id, ...job, open: true, state: WORDS[job.state] ?? job.state, at: job.arrived }));
  const ended = Object.entries(state.ended).map(([id, job]) => ({ id, ...job, open: false, state: job.outcome, at: job.ended }));
  return [...open.sort((one, other) => other.at - one.at), ...ended.sort((one, other) => other.at - one.at)];
}

export function Answers({ state, time, onChoose }) {
  const [filter, setFilter] = useState("all");
  const rows = rowsOf(state);
  const shown = rows.filter(FILTERS[filter]);
  return html`<section class="stack" aria-label="Answers">
    <div class="filters" role="group" aria-label="Show">
      ${Object.entries(FILTERS).map(
        ([name, fits]) => html`<button type="button" key=${name} aria-pressed=${filter === name} onClick=${() => setFilter(name)}>
          ${name} <span class="number">${count(rows.filter(fits).length)}</span>
        </button>`,
      )}
    </div>
    ${shown.length === 0
      ? html`<${Empty} title="Nothing here"><p>Answers appear as soon as somebody asks.</p><//>`
      : html`<div class="card table-card" tabindex="0" role="region" aria-label="List of answers">
          <table class="jobs">
            <thead>
              <tr><th>State</th><th>Job</th><th>From</th><th class="minor">Progress</th><th class="number minor">Prompt</th><th class="number">Answer</th><th class="number">Time</th><th><span class="sr-only">Actions</span></th></tr>
            </thead>
            <tbody>${shown.map((row) => html`<${Row} key=${row.id} row=${row} time=${time} onChoose=${onChoose} />`)}</tbody>
          </table>
        </div>`}
  </section>`;
}

function Row({ row, time, onChoose }) {
  return html`<tr>
    <td><${StatePill} state=${row.state} stale=${row.stale} /></td>
    <td class="job"><button type="button" class="link mono" onClick=${() => onChoose(row.id)} aria-label=${`${shortId(row.id)}, details`}>${shortId(row.id)}</button></td>
    <td class="about muted">${row.source}${row.key ? `, ${row.key}` : ""}</td>
    <td class="minor">${row.open ? html`<${Progress} row=${row} />` : html`<span class="muted">${row.preemptions ? plural(row.preemptions, "preemption") : ""}</span>`}</td>
    <td class="number minor">${count(row.prompt_tokens)}</td>
    <td class="number" data-unit="tokens">${count(row.generated)}</td>
    <td class="number">${seconds(row.open ? Math.max(0, time - row.arrived) : row.seconds)}</td>
    <td class="actions">${row.open && html`<${IconButton} icon="cancel" label=${`Cancel job ${row.id}`} onClick=${() => disk.cancel(row.id)} />`}</td>
  </tr>`;
}

/** Reading the prompt fills a bar, and writing the answer fills it again. */
export function Progress({ row }) {
  const reading = row.prefilled < row.prompt_tokens;
  const share = reading ? row.prefilled / row.prompt_tokens : row.generated / (row.max_tokens * row.outputs);
  return html`<progress class=${reading ? "reading" : ""} max="1" value=${share} aria-label=${reading ? "Of the prompt" : "Of the longest answer"}></progress>`;
}

const KINDS = { running: "good", reading: "good", done: "good", waiting: "", queued: "", "waiting again": "warn", cancelled: "", in_progress: "good", completed: "good" };

export const StatePill = ({ state, stale = false }) =>
  html`<span class="pill"><span class="dot ${stale ? "warn" : (KINDS[state] ?? "bad")}"></span>${stale ? "stale" : state.replaceAll("_", " ")}</span>`;
