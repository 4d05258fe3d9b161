// The conversations of this browser.

import { useStore } from "../store.js";
import { IconButton, chooseFile, download } from "../ui.js";
import { html } from "../vendor/preact-htm.js";
import { chats } from "./chats.js";

export function ConversationList({ onChosen = () => {} }) {
  const { all, current } = useStore(chats);
  const open = (id) => {
    chats.open(id);
    onChosen();
  };
  const start = () => {
    chats.start();
    onChosen();
  };
  return html`<section class="conversations" aria-label="Conversations">
    <header>
      <h2>Conversations</h2>
      <div>
        <${IconButton} icon="upload" label="Import conversations" onClick=${importFile} />
        ${all.length > 0 && html`<${IconButton} icon="download" label="Export all conversations" onClick=${exportAll} />`}
        <${IconButton} icon="plus" label="New conversation" onClick=${start} />
      </div>
    </header>
    <ul>
      ${all.map(
        ({ id, title }) => html`<li key=${id}>
          <button type="button" aria-current=${id === current.id} onClick=${() => open(id)}>${title || "Untitled"}</button>
          <${IconButton} icon="trash" label=${`Delete ${title}`} onClick=${() => chats.remove(id)} />
        </li>`,
      )}
    </ul>
  </section>`;
}

const exportAll = () => download("penstock-conversations.json", chats.export());

async function importFile() {
  const file = await chooseFile(".json,application/json");
  if (!file) return;
  try {
    chats.import(await file.text());
  } catch (error) {
    chats.problem = error.message;
    chats.changed();
  }
}
