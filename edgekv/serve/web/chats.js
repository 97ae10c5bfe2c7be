// Chats that this browser keeps: the newest, as many as fit.

const PLACE = "edgekv.chat.", MOST = 100;
const LARGEST = 1e6, ALL = 4e6; // characters; browsers keep five million of a site

// All of them, the newest first.
function savedChats() {
  const found = [];
  for (const key of Object.keys(local).filter((one) => one.startsWith(PLACE))) {
    const text = local.getItem(key);
    try {
      found.push({ chat: JSON.parse(text), size: text.length });
    } catch {
      local.removeItem(key);
    }
  }
  return found.sort((a, b) => b.chat.changed - a.chat.changed);
}

const savedChat = (id) => savedChats().find((one) => one.chat.id === id)?.chat;

// The oldest ones make room. Returns whether the chat is saved.
function save(chat) {
  chat.changed = Date.now();
  const text = JSON.stringify(chat);
  if (text.length > LARGEST) return false;
  const others = savedChats().filter((one) => one.chat.id !== chat.id);
  let size = others.reduce((sum, one) => sum + one.size, text.length);
  while (others.length >= MOST || size > ALL) {
    const oldest = others.pop();
    size -= oldest.size;
    forget(oldest.chat);
  }
  try {
    local.setItem(PLACE + chat.id, text);
    return true;
  } catch {
    return false;
  }
}

function forget(chat) {
  local.removeItem(PLACE + chat.id);
}
