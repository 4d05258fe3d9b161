// One message: its text, its branches, and what can be done with it.

import { count, rate, seconds } from "../format.js";
import { CopyButton, IconButton, Notice } from "../ui.js";
import { html, useState } from "../vendor/preact-htm.js";
import { chats } from "./chats.js";
import { Markdown } from "./markdown.js";
import { split } from "./reasoning.js";
import { branch, turn } from "./tree.js";

export const Message = ({ conversation, message, busy, writing }) =>
  message.role === "user"
    ? html`<${Question} conversation=${conversation} message=${message} busy=${busy} />`
    : html`<${Answer} conversation=${conversation} message=${message} busy=${busy} writing=${writing} />`;

function Question({ conversation, message, busy }) {
  const [editing, setEditing] = useState(false);
  const branched = branch(conversation, message).count > 1;
  if (editing) return html`<${Editor} message=${message} busy=${busy} onClose=${() => setEditing(false)} />`;
  return html`<article class="message user ${branched ? "branched" : ""}" aria-label="You">
    <div class="bubble">${message.text}</div>
    <div class="message-foot">
      <${CopyButton} text=${message.text} />
      <${IconButton} icon="edit" label="Edit" disabled=${busy} onClick=${() => setEditing(true)} />
      <${Branches} conversation=${conversation} message=${message} busy=${busy} />
    </div>
  </article>`;
}

const focus = (area) => area?.focus(); // defined once: a new function would be called again on every render

function Editor({ message, busy, onClose }) {
  const [text, setText] = useState(message.text);
  const send = (event) => {
    event.preventDefault();
    if (chats.isRunning(chats.current.id)) return; // another question was asked meanwhile
    onClose();
    chats.send(text.trim(), message.parent);
  };
  const press = (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation(); // it would stop the answer, too
    onClose();
  };
  return html`<article class="message user" aria-label="You">
    <form class="editor" onSubmit=${send}>
      <textarea
        aria-label="Edit your message"
        rows="3"
        value=${text}
        onInput=${(event) => setText(event.target.value)}
        onKeyDown=${press}
        ref=${focus}
      ></textarea>
      <div class="row">
        <button type="button" class="button compact" onClick=${onClose}>Cancel</button>
        <button class="button primary compact" disabled=${busy || !text.trim()}>Send</button>
      </div>
    </form>
  </article>`;
}

function Answer({ conversation, message, busy, writing }) {
  const { reasoning, answer, thinking } = split(message.text);
  return html`<article class="message assistant" aria-label="Answer" aria-busy=${writing}>
    <div>
      ${reasoning && html`<${Reasoning} text=${reasoning} thinking=${thinking && writing} />`}
      ${answer && html`<${Markdown} text=${answer} />`}
      ${writing && !answer && !reasoning && html`<div class="waiting" role="status" aria-label="Waiting for the answer"><i></i><i></i><i></i></div>`}
      ${message.error && html`<${Notice} kind="bad">${message.error}<//>`}
    </div>
    ${!writing &&
    html`<div class="message-foot">
      <${CopyButton} text=${answer} />
      <${IconButton} icon="retry" label="Answer again" disabled=${busy} onClick=${() => chats.regenerate(message)} />
      <${Branches} conversation=${conversation} message=${message} busy=${busy} />
      <span class="stats" title=${aboutPrompt(message)}>${describe(message)}</span>
    </div>`}
  </article>`;
}

const Reasoning = ({ text, thinking }) => html`<details class="reasoning">
  <summary>${thinking ? "Thinking…" : "Thoughts"}</summary>
  <div>${text}</div>
</details>`;

function Branches({ conversation, message, busy }) {
  const { index, count: all } = branch(conversation, message);
  if (all < 2) return null;
  const step = (by) => chats.show(turn(conversation, message, by));
  return html`<span class="branches">
    <${IconButton} icon="left" label="Previous version" disabled=${busy || index === 0} onClick=${() => step(-1)} />
    <span>${index + 1}/${all}</span>
    <${IconButton} icon="right" label="Next version" disabled=${busy || index === all - 1} onClick=${() => step(1)} />
  </span>`;
}

/** The figures of an answer, in one line. */
export function describe({ model, stats, finish }) {
  if (!stats) return "";
  return [
    chats.models.length > 1 && model,
    `${count(stats.tokens)} tokens`,
    stats.rate !== null && `${rate(stats.rate)} tokens/s`,
    stats.first !== null && `first after ${seconds(stats.first)}`,
    { length: "cut off at the longest answer", stopped: "stopped" }[finish],
  ]
    .filter(Boolean)
    .join(" · ");
}

const aboutPrompt = ({ stats }) => (stats?.prompt ? `${count(stats.prompt)} prompt tokens, ${count(stats.cached)} of them from the cache` : "");
