// The radix tree as an icicle: a row a level, an edge as wide as what it and all below it weigh.

const ROW = 24;
const SLIVER = 0.4; // pixels below which a node, and so all below it, is not drawn

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
    const was = this.zoomed ? this.signature(this.zoomed) : null;
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
    this.top = this.zoomed = this.focused = top;
    if (was) this.zoomed = this.focused = this.nodes.find((node) => this.signature(node) === was) || top;
    this.draw();
  }

  signature(node) {
    const parts = [];
    for (let at = node; at; at = at.up) parts.push(`${at.kind}/${at.tenant}/${at.identity}/${at.start}/${at.text}`);
    return parts.join("|");
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
      for (const child of item.node.below) {
        const wide = item.node.weight ? item.width * child.weight / item.node.weight : 0;
        if (wide < SLIVER) break; // the rest is no wider
        drawn.push({ node: child, x, width: wide, row: item.row + 1 });
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
    const ink = style.getPropertyValue("--ink"), card = style.getPropertyValue("--card");
    for (const item of drawn) this.drawNode(context, item, ink, card, style.getPropertyValue("--on-fill"));
    this.drawPath();
    if (this.nodes.length === 1) {
      context.fillStyle = style.getPropertyValue("--soft");
      context.textAlign = "center";
      context.fillText("Nothing is cached yet.", width / 2, height / 2);
      context.textAlign = "left";
    }
  }

  drawNode(context, { node, x, width, row }, ink, card, onFill) {
    const y = row * ROW, gap = width > 3 ? 1 : 0;
    const [fill, alpha] = this.fill(node);
    context.globalAlpha = alpha;
    context.fillStyle = fill;
    context.fillRect(x, y + 1, Math.max(width - gap, SLIVER), ROW - 2);
    context.globalAlpha = 1;
    if (node === this.focused && document.activeElement === this.box) {
      context.strokeStyle = ink;
      context.lineWidth = 2;
      context.strokeRect(x + 1, y + 2, Math.max(width - 3, 1), ROW - 4);
    }
    if (width < 34) return;
    context.save();
    context.beginPath();
    context.rect(x, y, width - 5, ROW);
    context.clip();
    context.fillStyle = alpha > 0.5 ? onFill : ink;
    context.fillText(this.label(node), x + 5, y + ROW / 2 + 0.5);
    context.restore();
  }

  fill(node) {
    if (node.kind === "all") return [NEUTRAL, 0.35];
    if (node.kind === "other") return [NEUTRAL, 0.25];
    if (this.colour === "tenant") return [colourOf(node.tenant), node.kind === "root" ? 1 : 0.72];
    if (this.colour === "references")
      return node.references ? [COLOURS[3], Math.min(1, 0.5 + 0.12 * node.references)] : [NEUTRAL, 0.45];
    if (node.idle_s === null) return [NEUTRAL, 0.25];
    return [COLOURS[0], Math.max(0.12, 1 - Math.log10(1 + node.idle_s) / 4)]; // 3 hours fade it
  }

  label(node) {
    if (node.kind === "all") return `everything: ${count(node.subtree_tokens)} tokens`;
    if (node.kind === "other") return `${count(node.subtree_nodes)} more`;
    if (node.kind === "root") return `${node.tenant === null ? "public" : node.tenant}  ${(node.identity || "").slice(0, 6)}`;
    return node.text ? node.text.replace(/\s+/g, " ") : `${count(node.tokens)} tokens`;
  }

  describe(node) {
    const lines = [this.label(node)];
    if (node.kind !== "all") {
      lines.push(`tokens ${node.start}–${node.start + node.tokens}, ${node.blocks} blocks, ${node.references} references`);
      lines.push(`tenant ${node.tenant === null ? "public" : node.tenant}, last use: ${span(node.idle_s)}`);
    }
    if (node.subtree_nodes > 1) lines.push(`with all below: ${count(node.subtree_tokens)} tokens in ${count(node.subtree_nodes)} nodes`);
    return lines.join("\n");
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
    const x = event.clientX - box.left + 12, y = event.clientY - box.top + this.box.scrollTop + 14;
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
    const path = [];
    for (let node = this.zoomed; node; node = node.up) path.unshift(node);
    $("tree-path").replaceChildren(...path.map((node) => {
      const button = make("button", node === this.zoomed ? { "aria-current": "true" } : {}, this.label(node));
      button.addEventListener("click", () => this.zoom(node));
      return button;
    }));
  }

  key(event) {
    const now = this.focused, beside = now?.up ? now.up.below : [now];
    const moves = {
      ArrowDown: () => now.below[0], ArrowUp: () => (now !== this.zoomed ? now.up : null),
      ArrowRight: () => (now !== this.zoomed ? beside[beside.indexOf(now) + 1] : null),
      ArrowLeft: () => (now !== this.zoomed ? beside[beside.indexOf(now) - 1] : null),
    };
    if (event.key in moves) {
      const next = moves[event.key]();
      if (next) { this.focused = next; this.draw(); this.say(next); }
    } else if (event.key === "Enter") this.zoom(now);
    else if (event.key === "Escape" || event.key === "Backspace") this.zoom(this.zoomed.up || this.zoomed);
    else return;
    event.preventDefault();
  }
}
