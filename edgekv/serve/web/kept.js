// What an answer took, and what of the conversation was kept.

async function look(button, box, conversation) {
  button.disabled = true;
  const place = made(box, "section", "kept");
  place.tabIndex = 0;
  place.ariaLive = "off";
  try {
    await fill(place, conversation);
    button.remove();
    place.scrollIntoView({ block: "nearest" });
  } catch (error) {
    place.remove();
    button.disabled = false;
    doing(error.message);
  }
}

async function fill(place, conversation, layer = "") {
  const wish = new URLSearchParams({ conversation, ...(layer !== "" && { layer }) });
  const { layers, n_heads: all, tokens } = await asked(`/kept?${wish}`);
  const content = document.createDocumentFragment();
  const select = made(content, "select");
  select.ariaLabel = "Layer";
  for (const one of ["", ...layers]) {
    const option = made(select, "option", "", one === "" ? "all layers" : `layer ${one}`);
    option.value = one;
  }
  select.value = layer;
  select.onchange = () => fill(place, conversation, select.value)
    .catch((error) => doing(error.message));
  const legend = made(content, "p", "cost", "kept by no head ");
  for (let i = 0; i <= 20; ++i) made(legend, "b", `k${i}`, "\u2002");
  legend.append(` by all ${count(all)} heads`);
  const words = made(content, "div");
  for (const [piece, n, level] of tokens) {
    made(words, "b", `k${level}`, piece).title = `${n} of ${all} heads`;
  }
  place.replaceChildren(content);
  if (layer !== "") select.focus();
}

function cost(box, { timings, kv }) {
  const line = made(box, "div", "cost");
  if (kv?.bytes_full) {
    const meter = made(line, "meter");
    [meter.max, meter.value] = [kv.bytes_full, Math.min(kv.bytes, kv.bytes_full)];
    meter.title = "memory of the conversation, beside that of a full cache";
    const share = Math.round(100 * kv.bytes / kv.bytes_full);
    line.append(` ${mib(kv.bytes)} of ${mib(kv.bytes_full)} (${share} %); `);
  }
  const speed = timings.predicted_per_second ?? 0;
  line.append(`${count(timings.prompt_n)} tokens read, ${count(timings.predicted_n)} written` +
    ` at ${speed.toFixed(1)} per second`);
  talk.querySelectorAll(".look").forEach((one) => one.remove());
  if (kv?.bytes_full && kv.method !== "full") {
    const title = "Show the conversation's text, coloured by how many heads keep each token";
    const open = (event) => look(event.currentTarget, box, kv.conversation);
    button(line, "What was kept", open, title, "look");
  }
}
