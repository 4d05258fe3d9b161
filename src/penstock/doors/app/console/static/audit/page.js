// The audit page, for the owner: what hidden states give away, as a heat map.

import { getJson, onKey, problemOf } from "../api.js";
import { Command } from "../pipes/details.js";
import { Empty, Page } from "../ui.js";
import { html, useEffect, useState } from "../vendor/preact-htm.js";

const FRONT = [
  ["Nearest embedding", (row) => row.nearest],
  ["… among the first ten", (row) => row.nearest_10],
  ["Linear map", (row) => row.mapped],
  ["… among the first ten", (row) => row.mapped_10],
  ["Search", (row) => row.search.recovered],
];
const BACK = [
  ["Norm and head: text", (row) => row.head_text],
  ["… answer", (row) => row.head_answer],
  ["Linear map: text", (row) => row.mapped_text],
  ["… answer", (row) => row.mapped_answer],
];

export function AuditPage() {
  const [reports, setReports] = useState(null);
  const [problem, setProblem] = useState("");
  const load = () =>
    getJson("audit")
      .then((found) => setReports(found.reports))
      .catch((error) => setProblem(problemOf(error)));
  useEffect(() => {
    load();
    return onKey(load);
  }, []);
  return html`<${Page} title="Audit" about="How much of a text others could recover from the hidden states that leave this machine">
    ${problem && html`<${Empty} title="For the owner of this server"><p>${problem}</p><//>`}
    ${reports?.length === 0 &&
    html`<${Empty} title="No audit yet">
      <p>Measure it on this machine; it takes a minute or two, and only figures are kept.</p>
      <${Command} text="penstock audit" />
    <//>`}
    ${reports?.map(({ report, written }) => html`<${Report} key=${report.model} report=${report} written=${written} />`)}
  <//>`;
}

const Report = ({ report, written }) => html`<section class="card stack" aria-label=${report.model}>
  <header>
    <h2>${report.model}</h2>
    <p class="muted small">
      ${report.layers} layers, ${report.dtype} on ${report.device}; ${report.tokens} tokens of text, ${report.answer_tokens} of answers;
      measured ${new Date(written * 1000).toLocaleDateString([], { dateStyle: "long" })}
    </p>
  </header>
  <${HeatMap} title="Percent of the prompt's tokens, from what leaves after the first layers" layers="First layers kept here" rows=${report.front} attacks=${FRONT} />
  <${HeatMap} title="Percent of all tokens, from what comes home before the last layers" layers="Last layers kept here" rows=${report.back} attacks=${BACK} />
  <p class="muted small">
    <code>--private-layers 1,1</code> keeps the first and the last layer on this machine. Who has the model's weights and patience can still search.
  </p>
</section>`;

/** A row for each attack, a column for each number of layers that stay here. */
const HeatMap = ({ title, layers, rows, attacks }) => html`<h3>${title}</h3>
<div class="heat" tabindex="0" role="region" aria-label=${title}>
  <table>
    <thead>
      <tr><th scope="col">${layers}</th>${rows.map((row) => html`<th scope="col" class="number">${row.kept}</th>`)}</tr>
    </thead>
    <tbody>
      ${attacks.map(
        ([name, read], index) => html`<tr key=${index}>
          <th scope="row">${name}</th>
          ${rows.map((row) => html`<td class=${`heat-${Math.min(9, Math.floor(read(row) * 10))}`}>${Math.round(read(row) * 100)}</td>`)}
        </tr>`,
      )}
    </tbody>
  </table>
</div>`;
