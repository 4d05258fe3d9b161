// Small components that every page uses.

import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";

const ICONS = {
  chat: "M4 5.5h16v11H9l-4 3.5v-3.5H4z",
  pipes: "M3 5h6v5H3zM15 14h6v5h-6zM6 10v3a3.5 3.5 0 0 0 3.5 3.5H15",
  jobs: "M8 6h12M8 12h12M8 18h12M4 6h.01M4 12h.01M4 18h.01",
  metrics: "M4 19V5M4 19h16M8 15l3.5-5 3 2.5L19 7",
  keys: "M14.5 9.5a4 4 0 1 1-8 0 4 4 0 0 1 8 0zM13.4 12.4l6.1 6.1M17 16l-2 2",
  audit: "M12 3l7.5 2.8v5.4c0 4.5-3 8-7.5 9.8-4.5-1.8-7.5-5.3-7.5-9.8V5.8zM9 12l2.2 2.2L15.3 10",
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "M5 12.5l4.5 4.5L19 7.5",
  edit: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  retry: "M19.5 12a7.5 7.5 0 1 1-2.2-5.3M19.5 3.5v4.2h-4.2",
  trash: "M4.5 7h15M10 7V4.5h4V7M6.5 7l.8 12.5h9.4L17.5 7",
  settings: "M4 7h9M17 7h3M4 17h3M11 17h9M15 4.8v4.4M9 14.8v4.4",
  theme: "M12 3.5v17M12 3.5a8.5 8.5 0 0 1 0 17 8.5 8.5 0 0 1 0-17M12 8h6M12 12h8M12 16h6",
  leave: "M10 4H5v16h5M15 8l4 4-4 4M19 12H10",
  menu: "M4 7h16M4 12h16M4 17h16",
  close: "M6 6l12 12M18 6L6 18",
  download: "M12 4v11M7 10.5l5 5 5-5M5 20h14",
  upload: "M12 16V5M7 9.5l5-5 5 5M5 20h14",
  left: "M14.5 6l-6 6 6 6",
  right: "M9.5 6l6 6-6 6",
  help: "M9 9.2a3 3 0 1 1 4.4 2.7c-1 .5-1.4 1-1.4 2.1M12 17.5h.01",
  cancel: "M12 3.5a8.5 8.5 0 1 1 0 17 8.5 8.5 0 0 1 0-17M9 9l6 6M15 9l-6 6",
};

export const Icon = ({ name }) => html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><path d=${ICONS[name]} /></svg>`;

export const IconButton = ({ icon, label, ...rest }) =>
  html`<button type="button" class="icon-button" aria-label=${label} title=${label} ...${rest}><${Icon} name=${icon} /></button>`;

/** Copies a text, and briefly confirms it. */
export function CopyButton({ text, label = "Copy", wide = false }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    await writeClipboard(typeof text === "function" ? text() : text);
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  if (wide)
    return html`<button type="button" class="button compact" onClick=${copy}>
      <${Icon} name=${done ? "check" : "copy"} />${done ? "Copied" : label}
    </button>`;
  return html`<${IconButton} icon=${done ? "check" : "copy"} label=${done ? "Copied" : label} onClick=${copy} />`;
}

/** Pages over plain HTTP from another machine have no clipboard API. */
async function writeClipboard(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = Object.assign(document.createElement("textarea"), { value: text });
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** A modal dialog. The browser traps the focus and restores it; Escape and a click outside close it, unless `firm`. */
export function Dialog({ title, onClose, children, kind = "", firm = false }) {
  const element = useRef();
  useEffect(() => {
    element.current.showModal();
    return () => element.current?.close();
  }, []);
  const close = () => !firm && onClose();
  return html`<dialog
    ref=${element}
    class=${kind}
    aria-label=${title}
    onCancel=${(event) => {
      event.preventDefault();
      close();
    }}
    onClick=${(event) => event.target === element.current && close()}
  >
    <div class="dialog-head">
      <h2>${title}</h2>
      ${!firm && html`<${IconButton} icon="close" label="Close" onClick=${onClose} />`}
    </div>
    ${children}
  </dialog>`;
}

export const Empty = ({ title, children }) => html`<div class="empty"><h2>${title}</h2>${children}</div>`;

export const Notice = ({ kind = "", children }) => html`<p class="notice ${kind}" role=${kind === "bad" ? "alert" : "status"}>${children}</p>`;

export const Page = ({ title, about, actions, children }) => html`<main class="page" id="main" tabindex="0" aria-label=${title}>
  <div class="page-inner">
    <header class="page-head">
      <div>
        <h1>${title}</h1>
        ${about && html`<p class="muted small">${about}</p>`}
      </div>
      ${actions && html`<div class="row">${actions}</div>`}
    </header>
    ${children}
  </div>
</main>`;

/** A drawing with clickable boxes: each is covered by a button, since screen readers do not read drawings. */
export const Drawing = ({ width, height, label, covers, children, ...rest }) => html`<div class="drawing" tabindex="0" role="region" aria-label=${label}>
  <div style=${{ width: `${width}px`, height: `${height}px` }}>
    <svg width=${width} height=${height} viewBox="0 0 ${width} ${height}" aria-hidden="true" ...${rest}>${children}</svg>
    ${covers.map(
      ({ key, x, y, width, height, label, onClick }) => html`<button
        type="button"
        key=${key}
        class="cover"
        aria-label=${label}
        style=${{ left: `${x}px`, top: `${y}px`, width: `${width}px`, height: `${height}px` }}
        onClick=${onClick}
      ></button>`,
    )}
  </div>
</div>`;

/** Offer a text as a file to save. */
export function download(name, text, type = "application/json") {
  const url = URL.createObjectURL(text instanceof Blob ? text : new Blob([text], { type }));
  Object.assign(document.createElement("a"), { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Let a person choose a file, and return its text; null if none was chosen. */
export function chooseFile(accept) {
  return new Promise((resolve) => {
    const input = Object.assign(document.createElement("input"), { type: "file", accept });
    input.addEventListener("change", () => resolve(input.files[0] ?? null));
    input.addEventListener("cancel", () => resolve(null));
    input.click();
  });
}
