// What is written next, and which chat is shown.

let editing = null, draft = null, isLeft = false;

// ---- the next message

// The messages that stay before it.
function earlier() {
  return editing ? chat.messages.slice(0, chat.messages.indexOf(editing)) : chat.messages;
}

function compose(message) {
  text.value = message.text;
  [files, refused] = [message.files ?? [], []];
  show();
}

function ready() {
  const asked = { role: "user", text: text.value.trim(), files }, was = editing, before = earlier();
  if (was) stopEditing();
  else compose({ text: "" });
  if (was?.role === "assistant") return change(was, asked, before);
  turn(before, asked, {}, () => {
    if (was && !isReading()) return edit(was, asked);
    const words = [asked.text, text.value].filter(Boolean).join("\n");
    compose({ text: words, files: [...asked.files, ...files] });
  });
}

// Another text for an answer; what came behind it goes.
function change({ thought }, now, before) {
  chat.messages = [...before, { role: "assistant", text: now.text, thought, edited: true }];
  draw(before.length);
  store(chat);
  compose({ text: text.value, files: [...files, ...now.files] });
}

// What is written there waits meanwhile. now: other words for the message.
function edit(message, now = message) {
  if (answering || isReading()) return;
  draft ??= { text: text.value, files };
  compose(now);
  mark(message);
  text.focus();
}

function stopEditing() {
  compose(draft);
  draft = null;
  mark(null);
}

function mark(message) {
  editing = message;
  at("cancel").hidden = !message;
  const n = earlier().length;
  talk.querySelectorAll("article").forEach((one, i) => one.classList.toggle("stale", i >= n));
  const isAnswer = message?.role === "assistant";
  send.textContent = isAnswer ? "Save" : "Send";
  if (isAnswer) doing("the answer is changed; what came behind it goes");
  else doing(message ? "what is dimmed is asked and answered anew" : "");
}

at("form").onsubmit = (event) => {
  event.preventDefault();
  if (answering) answering.abort();
  else if (isReading()) doing("wait until the files are read");
  else if (text.value.trim() || files.length) ready();
};
text.onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!answering) at("form").requestSubmit();
};
at("cancel").onclick = stopEditing;
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || at("chats").open) return;
  if (answering) answering.abort();
  else if (editing) stopEditing();
});

// ---- chats

function enter(next) {
  answering?.abort();
  if (editing) stopEditing();
  busy(null);
  chat = next;
  const unanswered = interrupted(chat.messages);
  compose({ text: text.value, ...unanswered });
  at("rules").value = chat.system;
  session.setItem("chat", chat.id);
  draw();
  text.focus();
}

// The page was left while an answer came: without any of it, the question is to be asked again.
function interrupted(messages) {
  const last = messages.at(-1);
  if (!last || last.last || last.failed || last.edited) return {};
  if (!last.text && !last.thought) return messages.splice(-2)[0];
  last.failed = "stopped";
  return {};
}

function store(one) {
  if (one.isGone || isLeft) return;
  if (!one.messages.length) forget(one);
  else if (!save(one)) doing("this chat is too large to be kept in this browser");
}

function remove(one) {
  forget(one);
  if (one.id !== chat.id) return;
  chat.isGone = true;
  enter(empty());
}

function listChats() {
  const place = at("chats").querySelector("ul");
  place.replaceChildren();
  for (const { chat: one } of savedChats()) {
    const row = made(place, "li"), { text: words, files: given } = one.messages[0];
    const open = () => {
      at("chats").close();
      if (one.id !== chat.id) enter(one);
    };
    button(row, words.slice(0, 200) || given[0].name, open, "Open this chat", "name");
    made(row, "span", "cost", new Date(one.changed).toLocaleString());
    button(row, "Delete", () => { remove(one); listChats(); });
  }
  if (!place.children.length) made(place, "li", "cost", "No chats are kept.");
}

at("list").onclick = () => { listChats(); at("chats").showModal(); };
at("close").onclick = () => at("chats").close();
at("all").onclick = () => {
  if (!confirm("Delete all chats and the system prompt from this browser?")) return;
  local.removeItem("edgekv.system");
  for (const { chat: one } of savedChats()) forget(one);
  remove(chat);
  listChats();
};
at("fresh").onclick = () => enter(empty());
at("rules").oninput = () => {
  chat.system = at("rules").value;
  local.setItem("edgekv.system", chat.system);
};
addEventListener("pagehide", () => {
  if (answering) store(chat);
  isLeft = true; // the answer breaks off now, which is no fault of it
});
addEventListener("pageshow", () => { isLeft = false; });

// ---- the server

at("enter").onclick = () => {
  session.setItem("key", at("key").value);
  at("lock").hidden = true;
  doing("");
};
asked("/v1/models").then(({ data: [model, ...others] }) => {
  if (!model) return doing("no model was found: run edgekv pull USER/REPO");
  if (model.status) return choose([model, ...others]);
  at("model").textContent = document.title = model.id;
  context = model.meta.n_ctx;
  at("context").textContent = `context of ${count(context)} tokens`;
}, (error) => doing(error.message));

// A server of many models: the one that was used last, or is loaded.
function choose(models) {
  const which = at("which"), last = local.getItem("edgekv.model");
  for (const { id } of models) made(which, "option", "", id);
  const first = models.find(({ id }) => id === last)
    ?? models.find(({ status }) => status.value === "loaded") ?? models[0];
  which.value = first.id;
  which.onchange = () => {
    named = document.title = which.value;
    local.setItem("edgekv.model", named);
  };
  which.onchange();
  which.hidden = !(at("model").hidden = true);
}

enter(savedChat(session.getItem("chat")) ?? empty());
