// The settings of a conversation: system prompt, sampling, and the schema of answers.

import { Dialog } from "../ui.js";
import { html } from "../vendor/preact-htm.js";
import { NUMBERS, mistakes } from "./request.js";

/** onChange takes what has changed: two fields may change before the settings are drawn again. */
export function SettingsDialog({ settings, onChange, onReset, onClose }) {
  const wrong = mistakes(settings);
  const set = (name) => (event) => onChange({ [name]: event.target.value });
  return html`<${Dialog} title="Settings of this conversation" kind="drawer" onClose=${onClose}>
    <div class="settings">
      <label class="field">
        System prompt
        <textarea rows="4" value=${settings.system ?? ""} placeholder="How the model should answer" onInput=${set("system")}></textarea>
      </label>
      <div class="pair">
        ${NUMBERS.map(
          ({ name, title, hint, step, min, max }) => html`<label class="field" key=${name}>
            ${title}
            <input
              type="number"
              inputmode="decimal"
              placeholder="default"
              step=${step}
              min=${min}
              max=${max}
              value=${settings[name] ?? ""}
              aria-invalid=${Boolean(wrong[name])}
              onInput=${set(name)}
            />
            <span class="hint ${wrong[name] ? "bad" : ""}">${wrong[name] ?? hint}</span>
          </label>`,
        )}
      </div>
      <label class="field">
        JSON schema
        <textarea
          class="mono"
          rows="7"
          spellcheck="false"
          value=${settings.schema ?? ""}
          placeholder='{"type": "object", ...}'
          aria-invalid=${Boolean(wrong.schema)}
          onInput=${set("schema")}
        ></textarea>
        <span class="hint ${wrong.schema ? "bad" : ""}">${wrong.schema ?? "Answers follow it. Leave it empty for plain text."}</span>
      </label>
      <div class="row spread">
        <button type="button" class="button" onClick=${onReset}>Reset</button>
        <button type="button" class="button primary" onClick=${onClose}>Done</button>
      </div>
    </div>
  <//>`;
}
