// The chat page: a conversation and the input box.

import { onKey } from "../api.js";
import { live } from "../live.js";
import { useStore } from "../store.js";
import { Dialog, Icon, IconButton, Notice, download } from "../ui.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "../vendor/preact-htm.js";
import { chats } from "./chats.js";
import { ConversationList } from "./list.js";
import { Message, describe } from "./message.js";
import { SettingsDialog } from "./settings.js";
import { shown } from "./tree.js";

const SUGGESTIONS = ["What is the capital of France?", "Write a haiku about rivers.", "Show a for loop in Python."];
const NEAR_END = 80; // pixels: nearer, the view follows the answer

export function ChatPage() {
  const { current, running, problem } = useStore(chats);
  const [dialog, setDialog] = useState("");
  const messages = shown(current);
  useEffect(() => {
    chats.loadModels();
    return onKey(() => chats.loadModels());
  }, []);
  return html`<main class="chat ${messages.length ? "" : "fresh"}" id="main">
    <header class="chat-head">
      <span class="only-phone"><${IconButton} icon="menu" label="Conversations" onClick=${() => setDialog("list")} /></span>
      <h1>${current.title || "New conversation"}</h1>
      <${ModelChoice} />
      ${messages.length > 0 && html`<${IconButton} icon="download" label="Export this conversation" onClick=${() => save(current)} />`}
      <${IconButton} icon="settings" label="Settings of this conversation" onClick=${() => setDialog("settings")} />
    </header>
    <${Messages} conversation=${current} messages=${messages} running=${running} />
    <div class="composer">
      <div class="column">
        ${problem && html`<${Notice} kind="bad">${problem}<//>`}
        <${Composer} key=${current.id} running=${running} />
        <div class="composer-note" aria-live="off">${running && describe(messages.at(-1))}</div>
      </div>
    </div>
    ${dialog === "settings" &&
    html`<${SettingsDialog}
      settings=${current.settings}
      onChange=${(changes) => chats.configure({ ...chats.current.settings, ...changes })}
      onReset=${() => chats.configure({})}
      onClose=${() => setDialog("")}
    />`}
    ${dialog === "list" &&
    html`<${Dialog} title="Penstock" kind="drawer left" onClose=${() => setDialog("")}>
      <${ConversationList} onChosen=${() => setDialog("")} />
    <//>`}
  </main>`;
}

const save = ({ id, title }) => download(`${title.replace(/[^\w -]/g, "").trim() || "conversation"}.json`, chats.export(id));

function ModelChoice() {
  const { models, model } = useStore(chats);
  if (models.length < 2) return html`<span class="muted small">${model}</span>`;
  return html`<select aria-label="Model" value=${model} onChange=${(event) => chats.choose(event.target.value)}>
    ${models.map((name) => html`<option value=${name}>${name}</option>`)}
  </select>`;
}

function Messages({ conversation, messages, running }) {
  const view = useRef();
  const follow = useRef(true);
  const scrolled = () => {
    const { scrollHeight, scrollTop, clientHeight } = view.current;
    follow.current = scrollHeight - scrollTop - clientHeight < NEAR_END;
  };
  useLayoutEffect(() => {
    follow.current = true;
  }, [conversation.id, messages.length]);
  useLayoutEffect(() => {
    if (follow.current) view.current.scrollTop = view.current.scrollHeight;
  });
  return html`<div class="messages" ref=${view} onScroll=${scrolled} tabindex="0" role="log" aria-live="off" aria-label="Conversation">
    ${messages.length
      ? html`<div class="column">
          ${messages.map(
            (message, index) => html`<${Message}
              key=${message.id}
              conversation=${conversation}
              message=${message}
              busy=${running}
              writing=${running && index === messages.length - 1}
            />`,
          )}
        </div>`
      : html`<${Greeting} />`}
    <span class="sr-only" role="status">${running ? "Writing" : messages.at(-1)?.finish ? "The answer is complete" : ""}</span>
  </div>`;
}

function Greeting() {
  const { state } = useStore(live);
  const machines = Object.keys(state?.nodes ?? {}).length;
  return html`<div class="greeting">
    <h2>Ask away</h2>
    <p class="muted">
      ${machines > 1 ? `Answered by ${machines} machines of your network.` : "Answered by this machine."} Conversations stay in this browser.
    </p>
    <div class="suggestions">
      ${SUGGESTIONS.map((text) => html`<button type="button" class="button" disabled=${!chats.model} onClick=${() => chats.send(text)}>${text}</button>`)}
    </div>
  </div>`;
}

function Composer({ running }) {
  const [text, setText] = useState("");
  const ready = text.trim() && !running && chats.model;
  const send = (event) => {
    event.preventDefault();
    if (!ready) return;
    chats.send(text.trim());
    setText("");
  };
  const press = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  return html`<form class="composer-box" onSubmit=${send}>
    <textarea
      rows="1"
      aria-label="Your message"
      placeholder="Write a message"
      value=${text}
      onInput=${(event) => setText(event.target.value)}
      onKeyDown=${press}
      ref=${focusOnDesktop}
    ></textarea>
    ${running
      ? html`<button type="button" class="round" aria-label="Stop" title="Stop (Esc)" onClick=${() => chats.stop()}>
          <svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><rect x="7" y="7" width="10" height="10" rx="2" fill="currentColor" /></svg>
        </button>`
      : html`<button class="round" aria-label="Send" title="Send (Enter)" disabled=${!ready}><${Icon} name="send" /></button>`}
  </form>`;
}

/** On a phone the keyboard would cover the page. */
function focusOnDesktop(area) {
  if (area && !area.dataset.known && matchMedia("(hover: hover)").matches) area.focus();
  if (area) area.dataset.known = "yes";
}
