// Markdown as components. Nothing becomes markup: HTML in a text is shown as text, and pictures as links.

import { CopyButton } from "../ui.js";
import { html } from "../vendor/preact-htm.js";
import { lexer } from "../vendor/marked.js";
import { highlight } from "./highlight.js";

export function Markdown({ text }) {
  return html`<div class="prose">${lexer(text).map(block)}</div>`;
}

function block(token) {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading":
      return html`<${`h${Math.min(token.depth + 1, 6)}`}>${inlines(token)}<//>`;
    case "paragraph":
      return html`<p>${inlines(token)}</p>`;
    case "code":
      return html`<${Code} code=${token.text} language=${(token.lang ?? "").split(/\s/)[0].toLowerCase()} />`;
    case "blockquote":
      return html`<blockquote>${token.tokens.map(block)}</blockquote>`;
    case "hr":
      return html`<hr />`;
    case "list":
      return token.ordered
        ? html`<ol start=${token.start || 1}>${token.items.map(item)}</ol>`
        : html`<ul>${token.items.map(item)}</ul>`;
    case "table":
      return html`<div class="table" tabindex="0" role="region" aria-label="Table">
        <table>
          <thead><tr>${token.header.map((cell) => html`<th>${inlines(cell)}</th>`)}</tr></thead>
          <tbody>${token.rows.map((row) => html`<tr>${row.map((cell) => html`<td>${inlines(cell)}</td>`)}</tr>`)}</tbody>
        </table>
      </div>`;
    case "text":
      return token.tokens ? html`<span>${inlines(token)}</span>` : unescaped(token.text);
    default:
      return html`<p>${token.raw}</p>`;
  }
}

const item = (token) => html`<li>
  ${token.task && html`<input type="checkbox" checked=${token.checked} disabled aria-label="done" /> `}${token.tokens.map(block)}
</li>`;

const inlines = (token) => (token.tokens ?? []).map(inline);

function inline(token) {
  switch (token.type) {
    case "strong":
      return html`<strong>${inlines(token)}</strong>`;
    case "em":
      return html`<em>${inlines(token)}</em>`;
    case "del":
      return html`<del>${inlines(token)}</del>`;
    case "codespan":
      return html`<code>${unescaped(token.text)}</code>`;
    case "br":
      return html`<br />`;
    case "link":
      return link(token.href, inlines(token), token.raw);
    case "image":
      return link(token.href, token.text || token.href, token.raw);
    case "text":
    case "escape":
      return token.tokens ? inlines(token) : unescaped(token.text);
    default:
      return token.raw;
  }
}

/** Only links that open a page or a mail; any other is text. */
const link = (href, children, raw) =>
  /^(https?:|mailto:)/i.test(href) ? html`<a href=${href} target="_blank" rel="noopener noreferrer">${children}</a>` : raw;

const ENTITIES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'" };
const unescaped = (text) => text.replace(/&(?:amp|lt|gt|quot|#39);/g, (entity) => ENTITIES[entity]);

const Code = ({ code, language }) => html`<div class="code">
  <header><span>${language || "text"}</span><${CopyButton} text=${code} label="Copy code" /></header>
  <pre tabindex="0" aria-label="Code"><code>${highlight(code, language)}</code></pre>
</div>`;
