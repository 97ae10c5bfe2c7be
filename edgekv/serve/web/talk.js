// A chat's messages, and how one is asked and answered.

let chat = empty(), answering = null;

// A message has a role and a text; a question may have files, an answer a thought, what it took
// (`last`), why it ended early (`failed`), and whether it was changed by hand (`edited`).
function empty() {
  const id = `${Date.now().toString(36)}${Math.random().toString(36).slice(2)}`;
  return { id, system: local.getItem("edgekv.system") ?? "", messages: [] };
}

// Messages as the server takes them: each file is a text of its own.
function wire(messages) {
  return messages.map(({ role, text, files }) => {
    if (!files?.length) return { role, content: text };
    const parts = [...files.map((entry) => entry.content), text];
    return { role, content: parts.map((part) => ({ type: "text", text: part })) };
  });
}

// ---- on the page

// Shows the messages from one on; those before it are shown already.
function draw(from = 0) {
  [...talk.querySelectorAll("article")].slice(from).forEach((one) => one.remove());
  talk.querySelector(".note")?.remove();
  at("hint").hidden = chat.messages.length > 0;
  for (const message of chat.messages.slice(from)) {
    if (message.role === "user") question(message);
    else answer(message).finish();
  }
  talk.scrollTop = 1e9;
}

function question(message) {
  const article = made(talk, "article", "message user"), box = made(article, "div");
  for (const entry of message.files ?? []) made(box, "div", "document", label(entry));
  box.append(message.text);
  button(acts(article, message), "Edit", () => edit(message), "Ask this in other words");
}

function answer(message) {
  const article = made(talk, "article", "message"), thoughts = made(article, "details");
  made(thoughts, "summary", "", "Thoughts");
  const thought = made(thoughts, "div"), box = made(article, "div", "answer");
  const paint = () => {
    thoughts.hidden = !message.thought;
    thought.textContent = message.thought ?? "";
    markdown(box, message.text);
  };
  const finish = () => {
    paint();
    const line = acts(article, message);
    button(line, "Edit", () => edit(message), "Change this answer");
    button(line, "Regenerate", () => regenerate(message), "Have another answer written");
    button(line, "Continue", () => regenerate(message, message), "Have this answer go on");
    if (message.edited) made(article, "p", "cost", "edited");
    if (message.last) cost(article, message.last);
    if (message.failed) fault(article, message.failed);
  };
  paint();
  return { paint, finish };
}

function acts(article, message) {
  const line = made(article, "div", "acts");
  button(line, "Copy", (event) => copy(message.text, event.currentTarget), "Copy this message");
  return line;
}

const fault = (parent, why) => made(parent, "p", why === "stopped" ? "cost" : "wrong", why);

// ---- a turn

// begun: what the new answer begins with.
function regenerate(message, begun) {
  if (answering) return;
  if (editing) stopEditing();
  const i = chat.messages.indexOf(message);
  turn(chat.messages.slice(0, i - 1), chat.messages[i - 1], begun);
}

// Asks, and shows the answer. Where nothing is written the chat is what it was, and undo called.
async function turn(before, asked, { text = "", thought, edited } = {}, undo = () => {}) {
  const own = new AbortController(), mine = chat, old = mine.messages;
  const written = { role: "assistant", text, thought, edited };
  mine.messages = [...before, asked];
  draw(before.length);
  const view = answer(written);
  talk.scrollTop = 1e9;
  busy(own);
  const wish = wire(text ? [...mine.messages, written] : mine.messages);
  mine.messages.push(written);
  store(mine);
  await write(written, wish, view.paint, own.signal);
  const isEmpty = written.text === text && written.thought === thought;
  if (isEmpty) mine.messages = old;
  if (answering === own) { // no other chat is shown by now
    busy(null);
    if (isEmpty) {
      draw(before.length);
      undo();
      fault(talk, written.failed ?? "the model wrote nothing").classList.add("note");
      talk.scrollTop = 1e9;
    } else following(view.finish);
  }
  store(mine);
}

async function write(written, messages, paint, signal) {
  const shown = paced(() => following(paint)), rules = chat.system.trim();
  if (rules) messages.unshift({ role: "system", content: rules });
  const body = { messages, stream: true, return_progress: true };
  doing("waiting");
  try {
    const reply = await checked(await ask("/v1/chat/completions", body, { signal }));
    for await (const chunk of chunks(reply)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const now = chunk.prompt_progress, delta = chunk.choices[0]?.delta ?? {};
      if (now) doing(`reading ${count(now.processed)} of ${count(now.total)} tokens`,
        now.processed, now.total);
      const { content = "", reasoning_content: thought = "" } = delta;
      if (thought) written.thought = (written.thought ?? "") + thought;
      written.text += content ?? "";
      if (content || thought) doing("writing");
      if (chunk.timings) written.last = { timings: chunk.timings, kv: chunk.kv };
      shown();
    }
  } catch (error) {
    written.failed = error.name === "AbortError" ? "stopped" : error.message;
  }
}

async function* chunks(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function busy(own) {
  answering = own;
  send.textContent = own ? "Stop" : "Send";
  document.body.classList.toggle("busy", Boolean(own));
  doing("");
}
