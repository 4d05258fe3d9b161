// The keys page, for the owner: make, limit and revoke keys, and see what each has used.

import { call, getJson, onKey } from "../api.js";
import { bytes, count } from "../format.js";
import { CopyButton, Dialog, Empty, Icon, IconButton, Notice, Page } from "../ui.js";
import { html, useEffect, useState } from "../vendor/preact-htm.js";

const AGAIN_MS = 5000; // servers write usage that often
const LIMITS = [
  { name: "jobs", title: "Answers at once", words: (value) => `${value} at once` },
  { name: "tokens_per_minute", title: "Tokens a minute", words: (value) => `${count(value)} tokens a minute` },
  { name: "priority", title: "Highest priority", words: (value) => `priority up to ${value}` },
  { name: "disk", title: "Disk space in bytes", words: (value) => bytes(value) },
  { name: "batches", title: "Open batches", words: (value) => `${value} open batches` },
];

export function KeysPage() {
  const [keys, setKeys] = useState(null);
  const [problem, setProblem] = useState(null);
  const [dialog, setDialog] = useState(null);
  const load = async () => {
    try {
      setKeys((await getJson("keys")).keys);
      setProblem(null);
    } catch (error) {
      setProblem(error.status === 401 ? null : error);
    }
  };
  useEffect(() => {
    load();
    const timer = setInterval(load, AGAIN_MS);
    const stop = onKey(load);
    return () => {
      stop();
      clearInterval(timer);
    };
  }, []);
  const change = async (path, method, body) => {
    try {
      await call(path, { method, body });
      await load();
    } catch (error) {
      setProblem(error);
    }
  };
  if (problem?.status === 403)
    return html`<${Page} title="Keys"><${Empty} title="For the owner of this server"><p>${problem.message}</p><//><//>`;
  const add = html`<button type="button" class="button" onClick=${() => setDialog({ kind: "new" })}><${Icon} name="plus" />New key</button>`;
  return html`<${Page} title="Keys" about="For others; each with limits of its own" actions=${add}>
    ${problem && html`<${Notice} kind="bad">${problem.message}<//>`}
    ${keys?.length === 0 && html`<${Empty} title="No keys yet"><p>Make one for each person or program that may use this server.</p><//>`}
    ${keys?.length > 0 && html`<${KeyTable} keys=${keys} change=${change} onLimit=${(key) => setDialog({ kind: "limits", key })} />`}
    ${dialog && html`<${KeyForm} dialog=${dialog} onClose=${() => setDialog(null)} onSaved=${load} />`}
  <//>`;
}

function KeyTable({ keys, change, onLimit }) {
  const path = (key, more = "") => `keys/${encodeURIComponent(key.name)}${more}`;
  return html`<div class="card table-card" tabindex="0" role="region" aria-label="List of keys">
    <table class="jobs">
      <thead>
        <tr><th>Name</th><th class="minor">Key</th><th>Limits</th><th class="number">Tokens today</th><th class="number minor">In all</th><th class="number minor">Requests</th><th class="number minor">Disk</th><th><span class="sr-only">Actions</span></th></tr>
      </thead>
      <tbody>
        ${keys.map(
          (key) => html`<tr key=${key.name} class=${key.state}>
            <td><strong>${key.name}</strong>${key.state === "revoked" && html` <span class="pill">revoked</span>`}</td>
            <td class="mono muted minor">…${key.tail}</td>
            <td class="about muted">${describe(key.limits) || "no limits"}</td>
            <td class="job number" data-unit="tokens today">${tokens(key.today)}</td>
            <td class="number minor">${tokens(key.total)}</td>
            <td class="number minor">${count(key.total.requests)}</td>
            <td class="number minor">${bytes(key.disk_bytes)}</td>
            <td class="actions">
              ${key.state === "valid"
                ? html`<${IconButton} icon="settings" label=${`Limits of ${key.name}`} onClick=${() => onLimit(key)} />
                    <${IconButton} icon="cancel" label=${`Revoke ${key.name}`} onClick=${() => confirm(`Revoke the key ${key.name}? Its open answers end.`) && change(path(key, "/revoke"), "POST")} />`
                : html`<${IconButton} icon="trash" label=${`Forget ${key.name}`} onClick=${() => change(path(key), "DELETE")} />`}
            </td>
          </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

const tokens = ({ prompt_tokens, completion_tokens }) => count(prompt_tokens + completion_tokens);

const describe = (limits) =>
  [...LIMITS.filter(({ name }) => limits[name] !== undefined).map(({ name, words }) => words(limits[name])), limits.models && `only ${limits.models.join(" and ")}`]
    .filter(Boolean)
    .join(", ");

/** A form for a new key, or for the limits of one. A new key is shown once. */
function KeyForm({ dialog, onClose, onSaved }) {
  const { key } = dialog;
  const [fields, setFields] = useState({ name: "", ...key?.limits, models: key?.limits.models?.join(", ") ?? "" });
  const [problem, setProblem] = useState("");
  const [made, setMade] = useState("");
  const set = (name) => (event) => setFields((fields) => ({ ...fields, [name]: event.target.value }));
  const save = async (event) => {
    event.preventDefault();
    const body = {};
    for (const { name } of LIMITS) if (fields[name] !== undefined && fields[name] !== "") body[name] = Number(fields[name]);
    const models = fields.models.split(",").map((name) => name.trim()).filter(Boolean);
    if (models.length) body.models = models;
    try {
      if (key) {
        await call(`keys/${encodeURIComponent(key.name)}`, { method: "PUT", body });
        onClose();
      } else {
        setMade((await (await call("keys", { method: "POST", body: { name: fields.name.trim(), ...body } })).json()).key);
      }
      onSaved();
    } catch (error) {
      setProblem(error.message);
    }
  };
  if (made)
    return html`<${Dialog} title=${`The key of ${fields.name}`} kind="wide" onClose=${onClose}>
      <div class="stack">
        <p>Copy it now: it is stored nowhere, and not shown again.</p>
        <div class="command"><code>${made}</code><${CopyButton} text=${made} label="Copy the key" /></div>
        <div class="row"><button type="button" class="button primary" onClick=${onClose}>Done</button></div>
      </div>
    <//>`;
  return html`<${Dialog} title=${key ? `Limits of ${key.name}` : "New key"} kind="wide" onClose=${onClose}>
    <form class="settings" onSubmit=${save}>
      ${problem && html`<${Notice} kind="bad">${problem}<//>`}
      ${!key && html`<label class="field">Name<input required value=${fields.name} onInput=${set("name")} placeholder="bob" /><span class="hint">Who or what it is for</span></label>`}
      <div class="pair">
        ${LIMITS.map(
          ({ name, title }) => html`<label class="field" key=${name}>${title}<input type="number" step="1" placeholder="no limit" value=${fields[name] ?? ""} onInput=${set(name)} /></label>`,
        )}
      </div>
      <label class="field">Only these models<input value=${fields.models} onInput=${set("models")} placeholder="all" /></label>
      <div class="row"><button class="button primary">${key ? "Save" : "Make the key"}</button></div>
    </form>
  <//>`;
}
