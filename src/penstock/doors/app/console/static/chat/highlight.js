// Colours code well enough for reading: comments, strings, numbers, keywords and calls, in most languages alike.

import { html } from "../vendor/preact-htm.js";

const KEYWORDS = new Set(
  (
    "abstract and as assert async await begin bool boolean break case catch char class const continue def default defer del do double elif else end enum " +
    "except export extends extern false False final finally float fn for from func function global go if impl implements import in include int interface " +
    "is lambda let long loop match mod module move mut namespace new nil None nonlocal not null of operator or override package pass private protected " +
    "pub public raise ref return self Self short signed sizeof static str string struct super switch template then this throw trait true True try type " +
    "typedef typename union unsafe unsigned use using var virtual void volatile where while with yield select insert update delete create table into " +
    "values join on group by order limit set echo fi done esac local SELECT INSERT UPDATE DELETE CREATE TABLE INTO VALUES JOIN ON GROUP BY ORDER LIMIT FROM WHERE AND OR NOT"
  ).split(" "),
);
const HASH_COMMENTS = new Set(["py", "python", "sh", "bash", "shell", "console", "yaml", "yml", "toml", "ruby", "rb", "r", "make", "makefile", "perl", "ini"]);
const PLAIN = new Set(["", "text", "txt", "plain", "output", "markdown", "md"]);
const LONGEST = 20_000; // characters; beyond, colours cost more than they help

const patternOf = (language) =>
  new RegExp(
    [
      `(?<comment>${HASH_COMMENTS.has(language) ? "#[^\\n]*" : language === "sql" || language === "lua" ? "--[^\\n]*" : "\\/\\/[^\\n]*|\\/\\*[\\s\\S]*?(?:\\*\\/|$)|<!--[\\s\\S]*?-->"})`,
      "(?<string>\"\"\"[\\s\\S]*?(?:\"\"\"|$)|'''[\\s\\S]*?(?:'''|$)|\"(?:\\\\.|[^\"\\\\\\n])*\"?|'(?:\\\\.|[^'\\\\\\n])*'?|`(?:\\\\.|[^`\\\\])*`?)",
      "(?<number>\\b\\d[\\w.]*)",
      "(?<word>[A-Za-z_$][\\w$]*)(?<call>\\s*\\()?",
    ].join("|"),
    "g",
  );

export function highlight(code, language) {
  if (PLAIN.has(language) || code.length > LONGEST) return code;
  const parts = [];
  let end = 0;
  for (const match of code.matchAll(patternOf(language))) {
    const { comment, string, number, word, call = "" } = match.groups;
    const kind = comment ? "comment" : string ? "string" : number ? "number" : KEYWORDS.has(word) ? "keyword" : call ? "name" : "";
    if (!kind) continue;
    parts.push(code.slice(end, match.index), html`<span class="tok-${kind}">${word ?? match[0]}</span>`);
    end = match.index + (word ?? match[0]).length;
  }
  parts.push(code.slice(end));
  return parts;
}
