// The box in which a prompt is explained: what of it is cached, why the rest is not, where it parts.

function setUpExplain(getModel) {
  const kind = $("explain-kind"), text = $("explain-text"), system = $("explain-system");
  kind.addEventListener("change", () => {
    $("explain-system-label").hidden = kind.value !== "chat";
    $("explain-text-label").textContent = { chat: "User", prompt: "Prompt", json: "Body, as it would be sent" }[kind.value];
  });
  $("explain").addEventListener("submit", async (event) => {
    event.preventDefault();
    const out = $("explained");
    try {
      const body = { model: getModel(), ...bodyOf(kind.value, system.value, text.value) };
      showExplanation(out, await askJson("/v1/cache/explain", body));
    } catch (error) {
      out.replaceChildren(make("p", { class: "hint" }, error.message));
    }
  });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("explain").requestSubmit();
  });
}

function bodyOf(kind, system, text) {
  if (kind === "prompt") return { prompt: text };
  if (kind === "chat") {
    const messages = system ? [{ role: "system", content: system }] : [];
    return { messages: [...messages, { role: "user", content: text }] };
  }
  let body;
  try { body = JSON.parse(text); } catch (error) { throw new Error("This is no JSON: " + error.message); }
  if (body === null || typeof body !== "object" || Array.isArray(body)) throw new Error("Wanted a JSON object.");
  return body;
}

function showExplanation(out, found) {
  const parts = [["cached", found.resident_tokens, COLOURS[2]]];
  for (const [reason, tokens] of Object.entries(found.reasons))
    if (tokens) parts.push([REASONS[reason] || reason, tokens, reasonColour(reason)]);
  const bar = make("div", { class: "parts", role: "img",
    "aria-label": parts.map(([name, tokens]) => `${name}: ${tokens} tokens`).join(", ") });
  const legend = make("ul", { class: "legend" });
  for (const [name, tokens, colour] of parts) {
    if (!tokens) continue;
    bar.append(make("i", { style: { flex: String(tokens), background: colour }, title: `${name}: ${tokens}` }));
    legend.append(make("li", {}, make("i", { style: { background: colour } }), `${name}: ${tokens}`));
  }
  const children = [
    make("p", {}, make("b", {}, `${found.resident_tokens} of ${found.prompt_tokens} tokens`), " are cached."), bar, legend];
  if (found.divergence) {
    const at = found.divergence;
    children.push(make("p", {}, "It parts from what is cached at ", make("b", {}, `token ${at.token}`),
      `, in ${at.region.label}:`));
    children.push(make("div", { class: "diff" },
      make("span", { class: "shared" }, "… " + at.shared_text), "\n",
      make("ins", {}, "+ " + at.this_text), "\n", make("del", {}, "− " + at.other_text)));
  }
  for (const hint of found.hints) children.push(make("p", { class: "hint" }, hint.message));
  if (found.differs_in.length)
    children.push(make("p", { class: "hint" }, "More of it is cached under another " + found.differs_in.join(", ") + "."));
  out.replaceChildren(...children);
}
