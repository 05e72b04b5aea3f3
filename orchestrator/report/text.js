"use strict";
// Elements and texts. All text of the run comes through `shown`, `plain` or textContent: nothing is markup.

const DIGITS = new Intl.NumberFormat("en");

// Characters that move, hide or reorder others, and lone surrogates; newline and tab stay what they are.
const INVISIBLE = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e" +
    "\\u2060-\\u206f\\ufe00-\\ufe0f\\ufeff\\ufff9-\\ufffb\\ud800-\\udfff]|[\\u{e0000}-\\u{e0fff}]", "gu");

const CONTROLS = ("NUL SOH STX ETX EOT ENQ ACK BEL BS HT LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB " +
  "ESC FS GS RS US").split(" ");

function named(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) return CONTROLS[code];
  return "U+" + code.toString(16).toUpperCase().padStart(4, "0");
}

function plain(text) {
  return String(text).replace(INVISIBLE, named);
}

// The text as nodes, with every invisible character shown and set apart.
function shown(text) {
  const nodes = document.createDocumentFragment();
  let from = 0;
  for (const found of text.matchAll(INVISIBLE)) {
    nodes.append(text.slice(from, found.index), el("span", "control", named(found[0])));
    from = found.index + found[0].length;
  }
  nodes.append(text.slice(from));
  return nodes;
}

function el(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// A cost, in whatever currency the prices are.
function money(value) {
  return value === null ? "–" : value.toFixed(value < 1 ? 5 : 2);
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function link(hash, className, ...children) {
  const anchor = el("a", className, ...children);
  anchor.href = hash;
  return anchor;
}

function button(text, action) {
  const element = el("button", "", text);
  element.type = "button";
  element.addEventListener("click", action);
  return element;
}

function headed(scope, ...children) {
  const head = el("th", "", ...children);
  head.scope = scope;
  return head;
}

function columnHead(...children) {
  return headed("col", ...children);
}

function rowHead(...children) {
  return headed("row", ...children);
}

// What may be wider than the page.
function scrolled(child, label) {
  const box = el("div", "scroll", child);
  for (const [name, value] of [["role", "region"], ["aria-label", label]]) box.setAttribute(name, value);
  return box;
}

// What does not fit can be moved by keys: it gets a place in the order of the tab key.
function letKeysScroll() {
  for (const box of document.querySelectorAll(".scroll, pre, .rows, .rows li, dd, dt, .notices, .reason")) {
    const moves = getComputedStyle(box).overflowX === "auto" &&
      (box.scrollHeight > box.clientHeight + 1 || box.scrollWidth > box.clientWidth + 1);
    if (moves) box.tabIndex = 0;
    else if (box.hasAttribute("tabindex")) box.removeAttribute("tabindex");
  }
}

// Puts a text on the clipboard. `text`: it, or what makes it.
function copier(label, text) {
  const element = button(label, async () => {
    const copied = await navigator.clipboard.writeText(typeof text === "function" ? text() : text).then(() => true, () => false);
    element.textContent = copied ? "copied" : "not allowed here";
    setTimeout(() => { element.textContent = label; }, 1500);
  });
  element.className = "copy";
  return element;
}

function titled(element, title) {
  element.title = plain(title);
  return element;
}

// Pairs of name and value; a value may be text or an element.
function facts(pairs, className) {
  const list = el("dl", className || "facts");
  for (const [name, value] of pairs) {
    const told = typeof value === "string" ? shown(value) : value;
    list.append(el("div", "", el("dt", "", shown(name)), el("dd", "", told)));
  }
  return list;
}

// A part that is built when it is opened for the first time.
function folded(summary, className, build) {
  const details = el("details", className, el("summary", "", ...summary));
  details.addEventListener("toggle", () => {
    if (details.open && details.childElementCount === 1) details.append(build());
  });
  return details;
}

const STOPS = /"""(?:[^"\\]|\\[^]|"(?!""))*(?:""")?|'''(?:[^'\\]|\\[^]|'(?!''))*(?:''')?|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?|#[^\n]*|\b(?:and|as|assert|async|await|break|class|continue|def|del|elif|else|except|False|finally|for|from|global|if|import|in|is|lambda|None|nonlocal|not|or|pass|raise|return|True|try|while|with|yield)\b|\b\d[\w.]*/g;

// Python, faintly coloured.
function coloured(code) {
  const nodes = document.createDocumentFragment();
  let from = 0;
  for (const found of code.matchAll(STOPS)) {
    const [word] = found;
    const kind = word[0] === "#" ? "comment" : /["']/.test(word[0]) ? "string" : /\d/.test(word[0]) ? "number" : "word";
    nodes.append(shown(code.slice(from, found.index)), el("span", "py-" + kind, shown(word)));
    from = found.index + word.length;
  }
  nodes.append(shown(code.slice(from)));
  return nodes;
}

function whole(number) {
  return number === null ? "–" : DIGITS.format(Math.round(number));
}

// In four characters: 950, 7.6k, 26k, 1.2M.
function brief(number) {
  if (number < 1000) return String(number);
  const [of, unit] = number < 999_500 ? [1000, "k"] : [1e6, "M"];
  return (number / of).toFixed(number < 9.95 * of ? 1 : 0) + unit;
}

function bytes(number) {
  if (number < 1000) return `${number} B`;
  const place = Math.min(4, Math.floor(Math.log10(number) / 3 + 1e-9));
  const value = number / 1000 ** place;
  return `${value.toFixed(value < 10 ? 1 : 0)} ${["", "kB", "MB", "GB", "TB"][place]}`;
}

function seconds(number) {
  if (number === null) return "–";
  return number >= 100 ? `${whole(number)} s` : `${number.toFixed(number < 10 ? 2 : 1)} s`;
}

function score(number) {
  return number === null ? "–" : number.toFixed(3);
}

function counted(number, one, many) {
  return `${whole(number)} ${number === 1 ? one : many || one + "s"}`;
}

function mean(numbers) {
  return numbers.length ? numbers.reduce((sum, n) => sum + n, 0) / numbers.length : null;
}

function deviation(numbers) {
  if (!numbers.length) return null;
  const middle = mean(numbers);
  return Math.sqrt(mean(numbers.map((n) => (n - middle) ** 2)));
}

function quantile(sorted, share) {
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : null;
}

function known(numbers) {
  return numbers.filter((n) => n !== null).sort((a, b) => a - b);
}
