// The frame of the console: routes in the URL's fragment, navigation, theme, shortcuts, and the key dialog.

import { access } from "./api.js";
import { AuditPage } from "./audit/page.js";
import { ChatPage } from "./chat/page.js";
import { ConversationList } from "./chat/list.js";
import { chats } from "./chat/chats.js";
import { JobsPage } from "./jobs/page.js";
import { KeysPage } from "./keys/page.js";
import { live } from "./live.js";
import { MetricsPage } from "./metrics/page.js";
import { PipesPage } from "./pipes/page.js";
import { useStore } from "./store.js";
import { Dialog, Icon, IconButton, Notice } from "./ui.js";
import { html, render, useEffect, useState } from "./vendor/preact-htm.js";

const PAGES = [
  { name: "chat", title: "Chat", key: "c", view: ChatPage, sidebar: ConversationList },
  { name: "pipes", title: "Pipes", key: "p", view: PipesPage },
  { name: "jobs", title: "Jobs", key: "j", view: JobsPage },
  { name: "metrics", title: "Metrics", key: "m", view: MetricsPage },
  { name: "keys", title: "Keys", key: "k", view: KeysPage, ownersOnly: true },
  { name: "audit", title: "Audit", key: "a", view: AuditPage, ownersOnly: true },
];
const THEME = "penstock.theme";

const pageOf = (hash) => PAGES.find((page) => hash.replace(/^#\/?/, "").split("/")[0] === page.name) ?? PAGES[0];

function App() {
  const [page, setPage] = useState(pageOf(location.hash));
  const [help, setHelp] = useState(false);
  useStore(access);
  useEffect(() => {
    const turn = () => setPage(pageOf(location.hash));
    addEventListener("hashchange", turn);
    return () => removeEventListener("hashchange", turn);
  }, []);
  useEffect(() => {
    document.title = `${page.title} · Penstock`;
  }, [page]);
  useShortcuts(() => setHelp(true));
  return html`<div class="shell">
    <header class="topbar">
      <${Brand} />
      <div class="row"><${Tools} onHelp=${() => setHelp(true)} /></div>
    </header>
    <div class="sidebar">
      <${Brand} />
      <nav aria-label="Pages"><${Links} page=${page} /></nav>
      <div class="sidebar-part">${page.sidebar && html`<${page.sidebar} />`}</div>
      <div class="sidebar-foot"><${Connection} /><${Tools} onHelp=${() => setHelp(true)} /></div>
    </div>
    <div class="content"><${page.view} key=${page.name} /></div>
    <nav class="tabs" aria-label="Pages"><${Links} page=${page} /></nav>
    ${access.asked && html`<${KeyDialog} />`} ${help && html`<${HelpDialog} onClose=${() => setHelp(false)} />`}
  </div>`;
}

const Brand = () => html`<a class="brand" href="#/chat"><img src="console/icon.svg" alt="" />Penstock</a>`;

/** Only the owner's key sees the owner's pages; the server would refuse their requests with any other. */
function Links({ page }) {
  const { state } = useStore(live);
  const pages = PAGES.filter(({ ownersOnly }) => !ownersOnly || state?.scope === "all");
  return html`<ul class="nav">
  ${pages.map(
    ({ name, title }) =>
      html`<li key=${name}>
        <a href="#/${name}" aria-current=${name === page.name ? "page" : null}><${Icon} name=${name} />${title}</a>
      </li>`,
  )}
</ul>`;
}

function Connection() {
  const { state, connection } = useStore(live);
  const [kind, words] =
    connection === "lost"
      ? ["bad", "no connection"]
      : state === null
        ? ["", "connecting"]
        : state.draining
          ? ["warn", `${state.node} is leaving`]
          : ["good", state.network ? `${state.node} in ${state.network.name}` : state.node];
  return html`<div class="connection" role="status" title=${state ? `Penstock ${state.version}` : ""}>
    <span class="dot ${kind}"></span><span>${words}</span>
  </div>`;
}

function Tools({ onHelp }) {
  const [theme, setTheme] = useState(document.documentElement.dataset.theme ?? "");
  const next = { "": "dark", dark: "light", light: "" }[theme];
  const words = { "": "as the system", dark: "dark", light: "light" };
  const turn = () => {
    applyTheme(next);
    setTheme(next);
  };
  return html`<${IconButton} icon="help" label="Keyboard shortcuts" onClick=${onHelp} />
    <${IconButton} icon="theme" label=${`Theme: ${words[theme]}. Next: ${words[next]}`} onClick=${turn} />
    ${access.key && html`<${IconButton} icon="leave" label="Forget the key" onClick=${() => access.leave()} />`}`;
}

function applyTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  localStorage.setItem(THEME, theme);
}

function KeyDialog() {
  const enter = (event) => {
    event.preventDefault();
    const key = event.target.elements.key.value.trim(); // not a state: Enter may come before the page is drawn again
    if (key) access.enter(key);
  };
  return html`<${Dialog} title="This server needs a key" firm>
    <form class="stack" onSubmit=${enter}>
      ${access.refusal && html`<${Notice} kind="bad">${access.refusal}<//>`}
      <label class="field">
        Key
        <input type="password" name="key" autocomplete="off" autofocus />
        <span class="hint">It stays in this tab and is forgotten when you close it.</span>
      </label>
      <button class="button primary">Continue</button>
    </form>
  <//>`;
}

const HelpDialog = ({ onClose }) => html`<${Dialog} title="Keyboard shortcuts" onClose=${onClose}>
  <dl class="shortcuts">
    ${PAGES.map(({ key, title }) => html`<dt><kbd>g</kbd><kbd>${key}</kbd></dt><dd>${title}</dd>`)}
    <dt><kbd>g</kbd><kbd>n</kbd></dt>
    <dd>New conversation</dd>
    <dt><kbd>Enter</kbd></dt>
    <dd>Send</dd>
    <dt><kbd>Shift</kbd><kbd>Enter</kbd></dt>
    <dd>New line</dd>
    <dt><kbd>Esc</kbd></dt>
    <dd>Stop the answer, close a dialog</dd>
    <dt><kbd>?</kbd></dt>
    <dd>This list</dd>
  </dl>
<//>`;

function useShortcuts(showHelp) {
  useEffect(() => {
    let armed = 0;
    const press = (event) => {
      const { target, key } = event;
      if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
      if (key === "Escape") return pageOf(location.hash) === PAGES[0] && chats.stop();
      if (target.closest("input, textarea, select")) return;
      if (key === "?") return showHelp();
      if (key === "g") armed = Date.now();
      else if (Date.now() - armed < 1500) {
        armed = 0;
        const page = key === "n" ? PAGES[0] : PAGES.find((one) => one.key === key);
        if (!page) return;
        event.preventDefault();
        location.hash = `#/${page.name}`;
        if (key === "n") chats.start();
      }
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
}

applyTheme(localStorage.getItem(THEME) ?? "");
live.run();
render(html`<${App} />`, document.getElementById("app"));
