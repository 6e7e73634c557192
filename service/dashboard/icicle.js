// The radix tree as an icicle: a row a level, an edge as wide as what it and all below it weigh.

const ROW = 24;
const SLIVER = 1; // pixels below which a node is not drawn by itself, but as one with those beside it
const PARTS = 24; // that such nodes are drawn as below what was zoomed to, so that each zoom gets on

class Icicle {
  constructor() {
    this.box = $("tree-box");
    this.canvas = $("tree");
    this.tip = $("tree-tip");
    this.said = $("tree-said");
    this.colour = "tenant";
    this.nodes = [];
    this.rows = []; // what is drawn: for each row [{node, x, width}] from left to right
    this.zoomed = this.focused = null;
    this.rests = new Map(); // what stands for nodes too narrow to draw, as long as they are the same
    this.canvas.addEventListener("mousemove", (event) => this.hover(event));
    this.canvas.addEventListener("mouseleave", () => { this.tip.hidden = true; });
    this.canvas.addEventListener("click", (event) => {
      const node = this.at(event);
      if (node) this.zoom(node === this.zoomed && node.up ? node.up : node);
    });
    this.box.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  // Take a reply of /v1/cache/tree; what was looked at stays in view if it is still there.
  show(reply) {
    const was = this.zoomed ? [this.zoomed, this.focused].map((node) => this.pathOf(node)) : [];
    const top = { id: -1, up: null, kind: "all", tenant: null, below: [], tokens: 0, blocks: 0, own: 0,
      references: 0, idle_s: null, start: 0, text: null, level: 0, subtree_nodes: 0, subtree_tokens: 0 };
    const known = new Map();
    for (const given of reply.nodes) {
      const node = { ...given, below: [], own: given.tokens * (1 + given.references) };
      node.up = given.parent === null ? top : known.get(given.parent);
      node.level = node.up.level + 1;
      node.up.below.push(node);
      known.set(node.id, node);
    }
    this.nodes = [top, ...known.values()];
    for (const node of this.nodes) node.weight = node.own;
    for (let i = this.nodes.length - 1; i > 0; i--) this.nodes[i].up.weight += this.nodes[i].weight;
    for (const node of this.nodes) node.below.sort((a, b) => b.weight - a.weight);
    for (const node of top.below) { top.subtree_nodes += node.subtree_nodes; top.subtree_tokens += node.subtree_tokens; }
    [...new Set(reply.nodes.map((node) => node.tenant))].sort().forEach(colourOf);
    this.top = top;
    this.rests.clear();
    [this.zoomed, this.focused] = was.length ? was.map((path) => this.find(path)) : [top, top];
    this.draw();
  }

  // The way to a node in words that the next reply will also use of it; a node has no name.
  pathOf(node) {
    const path = [];
    for (let at = node; at.up; at = at.up) if (at.kind !== "rest") path.unshift(this.wordOf(at));
    return path;
  }

  wordOf(node) { return [node.kind, node.tenant, node.identity, node.start, node.tokens, node.text].join("/"); }

  find(path) {
    let at = this.top;
    for (const word of path) {
      const next = at.below.find((node) => this.wordOf(node) === word);
      if (!next) break; // it is gone: what it hung from is the nearest to it
      at = next;
    }
    return at;
  }

  // One node in the place of the children [from, to) of another, which are too narrow to draw.
  rest(node, from, to) {
    if (to - from === 1) return node.below[from];
    const name = `${node.id} ${from} ${to}`;
    if (!this.rests.has(name)) {
      const below = node.below.slice(from, to), sum = (of) => below.reduce((total, child) => total + of(child), 0);
      this.rests.set(name, { id: name, up: node, kind: "rest", tenant: node.tenant, identity: null, below, own: 0, tokens: 0,
        blocks: 0, references: 0, idle_s: null, start: below[0].start, text: null, level: node.level + 1,
        weight: sum((child) => child.weight), subtree_nodes: sum((child) => child.subtree_nodes),
        subtree_tokens: sum((child) => child.subtree_tokens) });
    }
    return this.rests.get(name);
  }

  // What is drawn below a node that is so many pixels wide: its children, the narrow ones together.
  children(node, width) {
    if (node.kind === "rest" && node !== this.zoomed) return [];
    const pixels = (child) => node.weight ? width * child.weight / node.weight : 0;
    const narrow = node.below.findIndex((child) => pixels(child) < SLIVER); // and so are all behind it
    if (narrow < 0) return node.below.map((child) => [child, pixels(child)]);
    const shown = node.below.slice(0, narrow), parts = node === this.zoomed ? PARTS : 1;
    const step = Math.ceil((node.below.length - narrow) / parts);
    for (let from = narrow; from < node.below.length; from += step)
      shown.push(this.rest(node, from, Math.min(from + step, node.below.length)));
    return shown.map((child) => [child, pixels(child)]);
  }

  draw() {
    const context = this.canvas.getContext("2d"), ratio = window.devicePixelRatio || 1;
    const width = this.box.clientWidth;
    this.rows = [];
    if (!this.top || !width) return;
    const drawn = [{ node: this.zoomed, x: 0, width, row: 0 }];
    for (const item of drawn) { // which grows meanwhile
      (this.rows[item.row] = this.rows[item.row] || []).push(item);
      let x = item.x;
      for (const [child, wide] of this.children(item.node, item.width)) {
        if (wide) drawn.push({ node: child, x, width: wide, row: item.row + 1 });
        x += wide;
      }
    }
    const height = Math.max(this.rows.length, 4) * ROW;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.width = width + "px";
    this.canvas.style.height = height + "px";
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    const style = getComputedStyle(document.documentElement);
    this.ink = style.getPropertyValue("--ink").trim();
    this.card = style.getPropertyValue("--card").trim();
    for (const item of drawn) this.drawNode(context, item);
    this.drawPath();
    if (this.nodes.length === 1) {
      context.fillStyle = style.getPropertyValue("--soft");
      context.textAlign = "center";
      context.fillText("Nothing is cached yet.", width / 2, height / 2);
      context.textAlign = "left";
    }
  }

  drawNode(context, { node, x, width, row }) {
    const y = row * ROW, gap = width > 3 ? 1 : 0;
    const [fill, alpha] = this.fill(node);
    context.globalAlpha = alpha;
    context.fillStyle = fill;
    context.fillRect(x, y + 1, Math.max(width - gap, SLIVER / 2), ROW - 2);
    context.globalAlpha = 1;
    if (node === this.focused && document.activeElement === this.box) {
      context.strokeStyle = this.ink;
      context.lineWidth = 2;
      context.strokeRect(x + 1, y + 2, Math.max(width - 3, 1), ROW - 4);
    }
    if (width < 30) return;
    context.fillStyle = inkOn(fill, alpha, this.card);
    context.fillText(this.fit(context, node, width - 10), x + 5, y + ROW / 2 + 0.5);
  }

  // What of a node's label has room: none of a number is cut off.
  fit(context, node, room) {
    const fits = (text) => context.measureText(text).width <= room;
    const label = this.label(node);
    if (fits(label)) return label;
    if (node.kind === "rest" || node.kind === "other") return fits("+" + count(node.subtree_nodes)) ? "+" + count(node.subtree_nodes) : "";
    if (node.kind === "node" && !node.text) return fits(count(node.tokens)) ? count(node.tokens) : "";
    let [least, most] = [0, label.length];
    while (least < most) {
      const half = (least + most + 1) >> 1;
      if (fits(label.slice(0, half).trimEnd() + "…")) least = half; else most = half - 1;
    }
    return least > 1 ? label.slice(0, least).trimEnd() + "…" : "";
  }

  fill(node) {
    if (node.kind === "all") return [NEUTRAL, 0.35];
    if (node.kind === "other") return [NEUTRAL, 0.25];
    if (node.kind === "rest") return [this.colour === "tenant" ? colourOf(node.tenant) : NEUTRAL, 0.35];
    if (this.colour === "tenant") return [colourOf(node.tenant), node.kind === "root" ? 1 : 0.72];
    if (this.colour === "references")
      return node.references ? [COLOURS[3], Math.min(1, 0.5 + 0.12 * node.references)] : [NEUTRAL, 0.45];
    if (node.idle_s === null) return [NEUTRAL, 0.25];
    return [COLOURS[0], Math.max(0.12, 1 - Math.log10(1 + node.idle_s) / 4)]; // 3 hours fade it
  }

  label(node) {
    if (node.kind === "all") return `everything: ${count(node.subtree_tokens)} tokens`;
    if (node.kind === "other" || node.kind === "rest") return `${count(node.subtree_nodes)} more`;
    if (node.kind === "root") return `${node.tenant === null ? "public" : node.tenant}  ${(node.identity || "").slice(0, 6)}`;
    return node.text ? node.text.replace(/\s+/g, " ") : `${count(node.tokens)} tokens`;
  }

  describe(node) {
    const lines = [this.label(node)];
    if (node.kind === "rest") lines.push("too narrow to be drawn one by one: zoom in");
    else if (node.kind === "other") lines.push("left out of what was asked for");
    else if (node.kind !== "all")
      lines.push(`tokens ${node.start}–${node.start + node.tokens}, ${node.blocks} blocks, ${node.references} references`);
    if (node.kind !== "all") {
      const use = node.kind === "rest" ? "" : `, last use: ${span(node.idle_s)}`;
      lines.push(`tenant ${node.tenant === null ? "public" : node.tenant}${use}`);
    }
    if (node.subtree_nodes > 1) lines.push(`with all below: ${count(node.subtree_tokens)} tokens in ${count(node.subtree_nodes)} nodes`);
    return lines.join("\n");
  }

  itemOf(node) {
    for (const row of this.rows) for (const item of row) if (item.node === node) return item;
    return this.rows[0]?.[0];
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect(), x = event.clientX - box.left;
    const row = this.rows[Math.floor((event.clientY - box.top) / ROW)] || [];
    return row.find((item) => x >= item.x && x < item.x + Math.max(item.width, 1))?.node || null;
  }

  hover(event) {
    const node = this.at(event);
    this.tip.hidden = !node;
    if (!node) return;
    this.tip.textContent = this.describe(node);
    const box = this.box.getBoundingClientRect();
    const x = event.clientX - box.left + 12, y = event.clientY - box.top + 14;
    this.tip.style.left = Math.max(0, Math.min(x, box.width - this.tip.offsetWidth - 8)) + "px";
    this.tip.style.top = y + "px";
  }

  zoom(node) {
    this.zoomed = this.focused = node;
    this.tip.hidden = true;
    this.box.scrollTop = 0;
    this.draw();
    this.say(node);
  }

  say(node) { this.said.textContent = this.describe(node); }

  drawPath() {
    const path = [], nav = $("tree-path");
    for (let node = this.zoomed; node; node = node.up) path.unshift(node);
    const had = [...nav.children].indexOf(document.activeElement);
    nav.replaceChildren(...path.map((node) => {
      const button = make("button", node === this.zoomed ? { "aria-current": "true" } : {}, this.label(node));
      button.addEventListener("click", () => this.zoom(node));
      return button;
    }));
    if (had >= 0) nav.children[Math.min(had, path.length - 1)].focus();
  }

  key(event) {
    const item = this.itemOf(this.focused);
    if (!item) return;
    const row = this.rows[item.row], below = this.rows[item.row + 1] || [], above = this.rows[item.row - 1] || [];
    const moves = {
      ArrowDown: () => below.find((other) => other.x >= item.x - 0.01 && other.x < item.x + item.width),
      ArrowUp: () => above.findLast((other) => other.x <= item.x + 0.01),
      ArrowRight: () => row[row.indexOf(item) + 1], ArrowLeft: () => row[row.indexOf(item) - 1],
      Home: () => row[0], End: () => row[row.length - 1],
    };
    if (event.key in moves) {
      const next = moves[event.key]();
      if (next) {
        this.focused = next.node;
        this.draw();
        const y = next.row * ROW, room = this.box.clientHeight;
        this.box.scrollTop = Math.min(y, Math.max(this.box.scrollTop, y + ROW - room));
        this.say(next.node);
      }
    } else if (event.key === "Enter" || event.key === " ") this.zoom(item.node);
    else if (event.key === "Escape" || event.key === "Backspace") this.zoom(this.zoomed?.up || this.zoomed);
    else return;
    event.preventDefault();
  }
}
