// The jobs page: answers, jobs on disk, batches. Numbers and states; never a word of a prompt or an answer.

import { call } from "../api.js";
import { clock, count, plural, seconds } from "../format.js";
import { live } from "../live.js";
import { useStore } from "../store.js";
import { Dialog, Empty, Icon, IconButton, Notice, Page, chooseFile, download } from "../ui.js";
import { html, useEffect, useState } from "../vendor/preact-htm.js";
import { Answers, Progress, StatePill, rowsOf } from "./answers.js";
import { disk } from "./disk.js";
import { Graph, shortId } from "./graph.js";

const TABS = { answers: "Answers", disk: "On disk", batches: "Batches" };

export function JobsPage() {
  const { state, time } = useStore(live);
  const { jobs, batches, problem } = useStore(disk);
  const [tab, setTab] = useState("answers");
  const [chosen, setChosen] = useState("");
  useEffect(() => disk.keepFresh(), []);
  if (state === null) return html`<${Page} title="Jobs"><${Empty} title="Waiting for the server" /><//>`;
  const whose = state.scope === "all" ? "Of all keys" : "Of this key";
  const views = {
    answers: html`<${Answers} state=${state} time=${time} onChoose=${setChosen} />`,
    disk: html`<${OnDisk} jobs=${jobs} onChoose=${setChosen} />`,
    batches: html`<${Batches} batches=${batches} />`,
  };
  return html`<${Page} title="Jobs" about=${`${whose}. Numbers and states, no text.`} actions=${tab === "batches" && html`<${Upload} />`}>
    ${problem && html`<${Notice} kind="bad">${problem}<//>`}
    <${TabList} tab=${tab} onTurn=${setTab} />
    <div role="tabpanel" id="panel" aria-labelledby=${`tab-${tab}`} class="stack">${views[tab]}</div>
    ${chosen && html`<${JobDialog} id=${chosen} state=${state} time=${time} onClose=${() => setChosen("")} />`}
  <//>`;
}

function TabList({ tab, onTurn }) {
  const names = Object.keys(TABS);
  const press = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = names[(names.indexOf(tab) + step + names.length) % names.length];
    onTurn(next);
    document.getElementById(`tab-${next}`).focus();
  };
  return html`<div class="tablist" role="tablist" aria-label="Kinds of jobs" onKeyDown=${press}>
    ${names.map(
      (name) => html`<button
        key=${name}
        type="button"
        role="tab"
        id=${`tab-${name}`}
        aria-selected=${tab === name}
        aria-controls="panel"
        tabindex=${tab === name ? 0 : -1}
        onClick=${() => onTurn(name)}
      >
        ${TABS[name]}
      </button>`,
    )}
  </div>`;
}

function OnDisk({ jobs, onChoose }) {
  if (!jobs.length)
    return html`<${Empty} title="No jobs on disk"><p>Submit one with <code>penstock work FOLDER "What is the capital of France?"</code></p><//>`;
  return html`<${Graph} jobs=${jobs} onChoose=${onChoose} />
    <div class="card table-card" tabindex="0" role="region" aria-label="Jobs on disk">
      <table class="jobs">
        <thead>
          <tr><th>State</th><th>Job</th><th>Tags</th><th class="minor">Submitted</th><th class="number minor">Prompt</th><th class="number minor">Answer</th><th class="number">Time</th><th><span class="sr-only">Actions</span></th></tr>
        </thead>
        <tbody>${jobs.map((job) => html`<${DiskRow} key=${job.id} job=${job} onChoose=${onChoose} />`)}</tbody>
      </table>
    </div>`;
}

function DiskRow({ job, onChoose }) {
  const open = job.status === "queued" || job.status === "running";
  return html`<tr>
    <td><${StatePill} state=${job.status} /></td>
    <td class="job"><button type="button" class="link mono" onClick=${() => onChoose(job.id)} aria-label=${`${shortId(job.id)}, details`}>${shortId(job.id)}</button></td>
    <td class="about muted">
      ${[...(job.tags ?? []), job.batch && "batch", job.waits_for && `waits for ${job.waits_for.length}`].filter(Boolean).join(", ")}
      ${job.error && html` <span class="bad small">${job.error}</span>`}
    </td>
    <td class="muted number-left minor">${clock(job.submitted)}</td>
    <td class="number minor">${figure(job.prompt_tokens)}</td>
    <td class="number minor">${figure(job.completion_tokens)}</td>
    <td class="number">${job.seconds === undefined ? "–" : seconds(job.seconds)}</td>
    <td class="actions">
      ${open
        ? html`<${IconButton} icon="cancel" label=${`Cancel job ${job.id}`} onClick=${() => disk.cancel(job.id)} />`
        : html`<${IconButton} icon="retry" label=${`Run job ${job.id} again`} onClick=${() => disk.retry(job.id)} />`}
    </td>
  </tr>`;
}

const figure = (value) => (value === undefined ? "–" : count(value));

/** Follow a job: its figures as they change. */
function JobDialog({ id, state, time, onClose }) {
  const row = rowsOf(state).find((one) => one.id === id);
  const stored = useStore(disk).jobs.find((one) => one.id === id);
  const facts = [
    ["State", row?.state ?? stored?.status ?? "gone"],
    ["Model", row?.model ?? stored?.model],
    ["From", row?.source],
    ["Key", row?.key ?? stored?.key],
    ["Arrived", row?.arrived && clock(row.arrived)],
    ["Submitted", stored && clock(stored.submitted)],
    ["Time", row && seconds(row.open ? Math.max(0, time - row.arrived) : row.seconds)],
    ["First token", row?.first_token !== undefined && `after ${seconds(row.first_token)}`],
    ["Prompt", row && `${count(row.prompt_tokens)} tokens${row.cached_tokens ? `, ${count(row.cached_tokens)} from the cache` : ""}`],
    ["Answer", row && `${plural(row.generated, "token")}${row.open ? ` of at most ${count(row.max_tokens)}` : ""}`],
    ["Preemptions", row && String(row.preemptions)],
    ["Priority", row && String(row.priority)],
    ["Comes after", stored?.after && Object.values(stored.after).map(shortId).join(", ")],
    ["Retry of", stored?.retry_of && shortId(stored.retry_of)],
    ["Will fail", stored?.will_fail],
    ["Error", stored?.error],
  ].filter(([, value]) => value);
  return html`<${Dialog} title=${`Job ${shortId(id)}`} kind="wide" onClose=${onClose}>
    <div class="stack">
      ${row?.open && html`<${Progress} row=${row} />`}
      <dl class="facts">${facts.map(([title, value]) => html`<dt>${title}</dt><dd>${value}</dd>`)}</dl>
      <p class="muted small mono">${id}</p>
    </div>
  <//>`;
}

// ---- batches ----

function Upload() {
  const choose = async () => {
    const file = await chooseFile(".jsonl,application/jsonl");
    if (file) disk.submit(file);
  };
  return html`<button type="button" class="button" onClick=${choose}><${Icon} name="upload" />Upload a batch</button>`;
}

function Batches({ batches }) {
  if (!batches.length)
    return html`<${Empty} title="No batches"><p>A batch is a file with one request in each line, in the format of OpenAI's Batch API.</p><//>`;
  return html`<div class="card table-card" tabindex="0" role="region" aria-label="List of batches">
    <table class="jobs">
      <thead>
        <tr><th>State</th><th>Batch</th><th class="minor">Endpoint</th><th class="minor">Progress</th><th class="number">Done</th><th class="number minor">Failed</th><th><span class="sr-only">Actions</span></th></tr>
      </thead>
      <tbody>${batches.map((batch) => html`<${BatchRow} key=${batch.id} batch=${batch} />`)}</tbody>
    </table>
  </div>`;
}

function BatchRow({ batch }) {
  const { total, completed, failed } = batch.request_counts;
  const open = ["validating", "in_progress", "finalizing"].includes(batch.status);
  return html`<tr>
    <td><${StatePill} state=${batch.status} /></td>
    <td class="job mono">${shortId(batch.id)}</td>
    <td class="muted minor">${batch.endpoint}</td>
    <td class="minor">${open ? html`<progress max=${total || 1} value=${completed + failed} aria-label="Of the requests"></progress>` : html`<span class="muted">${batch.errors?.data[0]?.message ?? ""}</span>`}</td>
    <td class="number" data-unit="done">${count(completed)} of ${count(total)}</td>
    <td class="number minor">${count(failed)}</td>
    <td class="actions">
      ${batch.output_file_id && html`<${IconButton} icon="download" label=${`Download the results of ${batch.id}`} onClick=${() => fetchFile(batch.output_file_id, `${batch.id}.jsonl`)} />`}
      ${batch.error_file_id && html`<${IconButton} icon="download" label=${`Download the errors of ${batch.id}`} onClick=${() => fetchFile(batch.error_file_id, `${batch.id}-errors.jsonl`)} />`}
      ${open && html`<${IconButton} icon="cancel" label=${`Cancel batch ${batch.id}`} onClick=${() => disk.cancelBatch(batch.id)} />`}
    </td>
  </tr>`;
}

const fetchFile = async (id, name) => download(name, await (await call(`v1/files/${id}/content`)).blob());
