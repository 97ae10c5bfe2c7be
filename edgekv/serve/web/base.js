// What all parts of the page use.

const at = (id) => document.getElementById(id);
const talk = at("talk"), text = at("text"), send = at("send");
const mib = (bytes) => `${(bytes / 2 ** 20).toFixed(1)} MiB`;
const count = (n) => n.toLocaleString("en");

// Stands in where a browser forbids pages to keep anything.
class Forgetful {
  getItem(key) { return this[key] ?? null; }
  setItem(key, words) { this[key] = words; }
  removeItem(key) { delete this[key]; }
}

function storage(name) {
  try {
    return window[name];
  } catch {
    return new Forgetful();
  }
}

const local = storage("localStorage"), session = storage("sessionStorage");

function made(parent, name, kind = "", content = "") {
  const element = document.createElement(name);
  if (kind) element.className = kind;
  element.textContent = content;
  parent.append(element);
  return element;
}

function button(parent, words, does, title = "", kind = "") {
  const element = made(parent, "button", kind, words);
  return Object.assign(element, { type: "button", title, onclick: does });
}

let named = ""; // the model that a server of many is asked for

function ask(path, body, more = {}) {
  if (named) path += `${path.includes("?") ? "&" : "?"}model=${encodeURIComponent(named)}`;
  const headers = { "Content-Type": "application/json" };
  const key = session.getItem("key");
  if (key) headers.Authorization = `Bearer ${key}`;
  const data = body instanceof Blob ? body : JSON.stringify(body);
  return fetch(path, { headers, ...(data && { method: "POST", body: data }), ...more });
}

async function checked(reply) {
  if (reply.ok) return reply;
  at("lock").hidden = reply.status !== 401;
  const said = await reply.json().catch(() => null);
  throw new Error(said?.error?.message ?? `status ${reply.status}`);
}

const asked = async (...wish) => (await checked(await ask(...wish))).json();

function doing(what, done, total) {
  at("doing").textContent = what;
  at("bar").hidden = total === undefined;
  if (total) [at("bar").value, at("bar").max] = [done, total];
}

// Where the end of the talk is seen, it still is after the change.
function following(change) {
  const follows = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 160;
  change();
  if (follows) talk.scrollTop = 1e9;
}

// A function that does something at most once for each picture of the screen.
function paced(does) {
  let waits = false;
  return () => {
    if (!waits) requestAnimationFrame(() => { waits = false; does(); });
    waits = true;
  };
}

async function copy(words, button) {
  try {
    await navigator.clipboard.writeText(words);
  } catch { // pages of other machines have no clipboard without TLS
    const place = made(document.body, "textarea", "", words);
    place.select();
    document.execCommand("copy");
    place.remove();
    button.focus();
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}
