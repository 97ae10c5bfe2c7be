// Files for the next message: the server turns each into text, and one that does not fit is
// refused at once.

const ROOM = 64; // tokens for a question and the begin of its answer
let files = [], refused = [], context = Infinity, adding = Promise.resolve();

function add(list) {
  refused = [];
  for (const file of list) {
    const entry = { name: file.name, content: "", n: null };
    files.push(entry);
    adding = adding.then(() => read(entry, file));
  }
  show();
}

async function read(entry, file) {
  const isWanted = () => files.includes(entry); // not left out, and the chat is the same
  if (!isWanted()) return;
  try {
    const said = await asked(`/extract?name=${encodeURIComponent(file.name)}`, file);
    entry.content = said.content;
    if (isWanted()) await check(entry, said.n_tokens);
    entry.n = said.n_tokens;
  } catch (error) {
    const whose = error.message.includes(file.name) ? "" : `${file.name}: `;
    if (isWanted()) refused.push(`${whose}${error.message}`);
    files = files.filter((one) => one !== entry);
  }
  show();
}

// Throws an error if the chat has no room for a file.
async function check(entry, nOwn) {
  const ready = files.filter((one) => one === entry || one.n !== null);
  const question = { role: "user", text: text.value.trim(), files: ready };
  const wish = { messages: wire([...earlier(), question]), system: chat.system.trim() };
  const { input_tokens: n } = await asked("/v1/messages/count_tokens", wish);
  if (n + ROOM <= context) return;
  throw new Error(`${entry.name} has ${count(nOwn)} tokens. With it the prompt would have ` +
    `${count(n)}, but the context is ${count(context)}: give a part of it, or start the server ` +
    "with a larger -c");
}

const isReading = () => files.some((entry) => entry.n === null);

function label(entry) {
  return entry.n === null ? `reading ${entry.name}` : `${entry.name}, ${count(entry.n)} tokens`;
}

function show() {
  at("files").replaceChildren();
  for (const entry of files) {
    button(at("files"), `${label(entry)} ×`, () => {
      files = files.filter((one) => one !== entry);
      show();
    }, "Leave this file out");
  }
  for (const why of refused) made(at("files"), "p", "wrong", why);
}

addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.classList.add("over");
});
addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("over");
});
addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("over");
  add(event.dataTransfer.files);
});
at("open").onclick = () => at("pick").click();
at("pick").onchange = () => { add([...at("pick").files]); at("pick").value = ""; };
