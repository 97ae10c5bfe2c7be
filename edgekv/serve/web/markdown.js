// Markdown as nodes, never by way of HTML: what a model writes cannot become part of the page.

const DEEPEST = 8; // lists and quotes within each other
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`\s]*)/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])([ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])([ \t]+|$)/;
const BREAKS = /^ {0,3}([-*+]|1[.)])[ \t]+\S/; // an item that ends a paragraph

/** Shows a text. What is there of the text's beginning stays, so that a text can grow. */
function markdown(place, source) {
  const parts = [...blocks(source.split("\n"))];
  parts.forEach((lines, i) => {
    const there = place.childNodes[i], raw = lines.join("\n");
    if (there?.raw === raw) return;
    const node = block(lines, 0);
    node.raw = raw;
    if (there) there.replaceWith(node);
    else place.append(node);
  });
  while (place.childNodes.length > parts.length) place.lastChild.remove();
}

function* blocks(lines) {
  for (let i = 0; i < lines.length;) {
    const end = lines[i].trim() ? endOf(lines, i) : i + 1;
    if (lines[i].trim()) yield lines.slice(i, end);
    i = end;
  }
}

/** Where the block ends that begins with line i. */
function endOf(lines, i) {
  const first = lines[i], fence = FENCE.exec(first);
  const until = (ends) => {
    let k = i + 1;
    while (k < lines.length && !ends(lines[k], k)) ++k;
    return k;
  };
  if (fence) return Math.min(until((line) => closes(line, fence[1])) + 1, lines.length);
  if (HEADING.test(first) || RULE.test(first)) return i + 1;
  if (QUOTE.test(first)) return until((line) => !QUOTE.test(line));
  if (ITEM.test(first)) return until((line, k) => endsList(first, line, lines[k - 1]));
  if (isTable(lines, i)) return until((line) => !line.includes("|"));
  return until((line, k) => !line.trim() || begins(line) || isTable(lines, k));
}

const begins = (line) => [FENCE, HEADING, RULE, QUOTE, BREAKS].some((one) => one.test(line));

function closes(line, fence) {
  const end = line.trim();
  return end.length >= fence.length && end === fence[0].repeat(end.length);
}

const width = (space) => space.replaceAll("\t", "    ").length;
const kind = (item) => (item[2].length > 1 ? "ol" : "ul");

function endsList(first, line, before) {
  const [list, item] = [ITEM.exec(first), ITEM.exec(line)];
  if (!line.trim() || width(/^[ \t]*/.exec(line)[0]) >= width(list[1]) + 2) return false;
  if (item && !RULE.test(line)) return kind(item) !== kind(list);
  return !before.trim() || begins(line);
}

function isTable(lines, i) {
  const next = lines[i + 1];
  return lines[i].includes("|") && Boolean(next?.includes("-")) &&
    cells(next).every((cell) => /^:?-+:?$/.test(cell)) &&
    cells(next).length === cells(lines[i]).length;
}

function cells(line) {
  const row = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return row.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function block(lines, depth) {
  const first = lines[0], heading = HEADING.exec(first), fence = FENCE.exec(first);
  const inside = depth < DEEPEST;
  if (fence) return code(lines, fence);
  if (heading) return inline(document.createElement(`h${heading[1].length}`), heading[2]);
  if (RULE.test(first)) return document.createElement("hr");
  if (inside && QUOTE.test(first)) {
    return body(document.createElement("blockquote"),
      lines.map((line) => line.replace(QUOTE, "")), depth);
  }
  if (inside && ITEM.test(first)) return list(lines, depth);
  if (isTable(lines, 0)) return table(lines);
  return inline(document.createElement("p"), lines.join("\n"));
}

function body(parent, lines, depth) {
  for (const part of blocks(lines)) parent.append(block(part, depth + 1));
  return parent;
}

function list(lines, depth) {
  const first = ITEM.exec(lines[0]), made = document.createElement(kind(first));
  if (kind(first) === "ol") made.start = parseInt(first[2], 10);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && width(item[1]) < width(first[1]) + 2) {
      const indent = width(item[1]) + item[2].length + 1;
      items.push({ indent, lines: [line.slice(item[0].length)] });
    } else items.at(-1).lines.push(dedented(line, items.at(-1).indent));
  }
  for (const item of items) made.append(body(document.createElement("li"), item.lines, depth));
  return made;
}

function dedented(line, most) {
  let i = 0;
  for (let n = 0; n < most && (line[i] === " " || line[i] === "\t"); ++i) n += width(line[i]);
  return line.slice(i);
}

function table(lines) {
  const made = document.createElement("table");
  lines.filter((_, i) => i !== 1).forEach((line, i) => {
    const row = made.insertRow();
    for (const cell of cells(line)) {
      row.append(inline(document.createElement(i ? "td" : "th"), cell));
    }
  });
  const box = document.createElement("div");
  box.className = "table";
  box.append(made);
  return box;
}

function code(lines, [, fence, language]) {
  const ended = lines.length > 1 && closes(lines.at(-1), fence);
  const words = lines.slice(1, ended ? -1 : undefined).join("\n");
  const box = document.createElement("div");
  const head = made(box, "div", "bar", language);
  button(head, "Copy", (event) => copy(words, event.currentTarget), "Copy this code");
  made(made(box, "pre"), "code", "", words);
  box.className = "code";
  return box;
}

// ---- within a line

const MARKS = { "*": "em", _: "em", "**": "strong", __: "strong", "~~": "s" };
const INLINE = new RegExp([
  "(`+)",
  "(\\*\\*|__|~~|[*_])",
  "(!?\\[([^\\[\\]\\n]{1,300})\\]" +
    "\\(((?:[^\\s()]|\\([^\\s()]{0,300}\\)){1,1000})(?: \"[^\"\\n]{0,300}\")?\\))",
  "(https?://[^\\s<>\"'`|]{1,1000})",
  "\\\\([!-/:-@[-`{-~])",
].join("|"), "g");

/** Adds a text with its emphasis, code and links to an element. */
function inline(parent, text) {
  const open = [], find = new RegExp(INLINE);
  const inner = () => open.at(-1)?.element ?? parent;
  let from = 0;
  for (let found; (found = find.exec(text));) {
    const at = found.index, [whole, ticks, delimiter, link, label, target, url, escaped] = found;
    inner().append(text.slice(from, at));
    from = find.lastIndex;
    if (ticks) from = codeSpan(inner(), text, ticks, from);
    else if (delimiter) from = at + emphasis(open, parent, text, at, delimiter).length;
    else if (link) anchor(inner(), link, label, target);
    else if (url) {
      const shown = url.replace(/[.,;:!?)\]*_~]+$/, "");
      from = at + shown.length;
      anchor(inner(), shown, shown, shown);
    } else inner().append(escaped ?? whole);
    find.lastIndex = from;
  }
  inner().append(text.slice(from));
  while (open.length) unwrap(open.pop());
  return parent;
}

/** Returns where the text goes on. */
function codeSpan(parent, text, ticks, from) {
  for (let at = from; (at = text.indexOf(ticks, at)) >= 0;) {
    const run = /`+/y;
    run.lastIndex = at;
    const n = run.exec(text)[0].length;
    if (n === ticks.length) {
      const words = text.slice(from, at);
      made(parent, "code", "", /^ .*[^ ].* $/s.test(words) ? words.slice(1, -1) : words);
      return at + n;
    }
    at += n;
  }
  parent.append(ticks);
  return from;
}

/** Begins or ends an emphasis, or adds the delimiter as text. Returns what of it was read. */
function emphasis(open, parent, text, at, delimiter) {
  const top = open.at(-1)?.mark;
  const mark = delimiter === top + top && text[at + 2] === top ? top : delimiter;
  const before = text[at - 1] ?? " ", after = text[at + mark.length] ?? " ";
  const apart = (one) => mark[0] !== "_" || !/[\p{L}\p{N}]/u.test(one);
  const begun = open.findLastIndex((one) => one.mark === mark);
  const inner = open.at(-1)?.element ?? parent;
  if (begun >= 0 && !/\s/.test(before) && apart(after) && open[begun].element.hasChildNodes()) {
    while (open.length > begun + 1) unwrap(open.pop());
    open.pop();
  } else if (begun < 0 && !/\s/.test(after) && apart(before)) {
    open.push({ mark, element: made(inner, MARKS[mark]) });
  } else inner.append(mark);
  return mark;
}

/** An emphasis that does not end is none. */
function unwrap({ mark, element }) {
  element.before(mark);
  while (element.firstChild) element.before(element.firstChild);
  element.remove();
}

/** Only addresses of the web lead somewhere; pictures are links, for the page loads nothing. */
function anchor(parent, whole, label, target) {
  if (!/^(https?:\/\/|mailto:)/i.test(target)) {
    parent.append(whole);
    return;
  }
  const link = made(parent, "a");
  Object.assign(link, { href: target, target: "_blank", title: target });
  link.rel = "noopener noreferrer";
  if (label.includes("://")) link.append(label);
  else inline(link, label);
}
