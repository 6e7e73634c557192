// Small charts of what came in while the page was open: lines, or areas on top of each other.

const HISTORY = 300; // points that are kept

class Chart {
  // options: {stacked, most(values) -> top of the axis, text(value), order(name, name) of the legend,
  // whole: whether values are whole numbers, empty: words for nothing to show}
  constructor(box, options) {
    this.box = box;
    this.options = options;
    this.points = []; // {time, values: {name: number | null}}
    this.colours = new Map();
    this.svg = makeSvg("svg", { role: "img", preserveAspectRatio: "none" });
    this.legend = make("ul", { class: "legend" });
    this.tip = make("div", { class: "tip", hidden: "" });
    box.append(this.svg, this.legend, this.tip);
    this.svg.addEventListener("mousemove", (event) => this.point(event));
    this.svg.addEventListener("mouseleave", () => { this.tip.hidden = true; });
    let width = 0; // drawing may change the height, which is no reason to draw
    new ResizeObserver(() => { if (box.clientWidth !== width) { width = box.clientWidth; this.draw(); } }).observe(box);
  }

  // Begin anew: what was shown was another caller's.
  clear() {
    this.points = [];
    this.colours.clear();
    this.legend.replaceChildren();
    this.tip.hidden = true;
    this.svg.removeAttribute("aria-label");
    this.draw();
  }

  add(time, values, colours) {
    for (const [name, colour] of Object.entries(colours)) this.colours.set(name, colour);
    this.points.push({ time, values });
    if (this.points.length > HISTORY) this.points.shift();
    this.draw();
  }

  names() {
    const seen = new Set(this.points.flatMap((point) => Object.keys(point.values)));
    return [...this.colours.keys()].filter((name) => seen.has(name)).sort(this.options.order);
  }

  scale() {
    const width = this.box.clientWidth || 300, height = 160, left = 44, bottom = 18;
    const first = this.points[0].time, last = this.points[this.points.length - 1].time;
    const most = this.options.most(this.points.map((point) => point.values)) || 1;
    return {
      width, height, left, bottom, most,
      x: (time) => left + (width - left - 6) * (last > first ? (time - first) / (last - first) : 1),
      y: (value) => 8 + (height - bottom - 8) * (1 - value / most),
      back: (x) => first + (last - first) * (x - left) / (width - left - 6),
    };
  }

  draw() {
    this.svg.replaceChildren();
    if (!this.points.length) return;
    const s = this.scale(), names = this.names(), text = this.options.text;
    this.svg.setAttribute("viewBox", `0 0 ${s.width} ${s.height}`);
    const some = this.points.some((point) => Object.values(point.values).some((value) => value || value === 0));
    for (const part of [0, 0.5, 1]) {
      if (part === 0.5 && (!some || (this.options.whole && s.most < 2))) continue; // no half of one, no line through words
      const y = s.y(part * s.most);
      this.svg.append(makeSvg("line", { class: "grid", x1: s.left, x2: s.width - 6, y1: y, y2: y }));
      this.svg.append(makeSvg("text", { x: s.left - 6, y: y + 4, "text-anchor": "end" }, text(part * s.most)));
    }
    const age = (this.points[this.points.length - 1].time - this.points[0].time) / 1000;
    this.svg.append(makeSvg("text", { x: s.left, y: s.height - 3 }, age >= 1 ? span(age) + " ago" : ""));
    this.svg.append(makeSvg("text", { x: s.width - 6, y: s.height - 3, "text-anchor": "end" }, "now"));
    if (!some)
      this.svg.append(makeSvg("text", { x: s.width / 2, y: s.height / 2, "text-anchor": "middle" }, this.options.empty));
    if (this.options.stacked) this.areas(s, names); else this.lines(s, names);
    this.legend.replaceChildren(...names.map((name) => make("li", {},
      make("i", { style: { background: this.colours.get(name) } }), name)));
    const last = this.points[this.points.length - 1].values;
    this.svg.setAttribute("aria-label",
      names.map((name) => `${name}: ${last[name] === null || last[name] === undefined ? "nothing" : text(last[name])}`).join(", "));
  }

  lines(s, names) {
    for (const name of names) {
      let path = "", drawing = false, dots = [];
      this.points.forEach((point, i) => {
        const value = point.values[name];
        if (value === null || value === undefined) { drawing = false; return; }
        path += `${drawing ? "L" : "M"}${s.x(point.time).toFixed(1)},${s.y(value).toFixed(1)}`;
        const next = this.points[i + 1]?.values[name];
        if (!drawing && (next === null || next === undefined)) dots.push(point);
        drawing = true;
      });
      const colour = this.colours.get(name);
      this.svg.append(makeSvg("path", { d: path || "M0,0", fill: "none", stroke: colour, "stroke-width": 2, "stroke-linejoin": "round" }));
      for (const dot of dots)
        this.svg.append(makeSvg("circle", { cx: s.x(dot.time), cy: s.y(dot.values[name]), r: 2.5, fill: colour }));
    }
  }

  areas(s, names) {
    const floor = this.points.map(() => 0);
    for (const name of names) {
      const top = this.points.map((point, i) => floor[i] + (point.values[name] || 0));
      const corner = (i, values) => `${s.x(this.points[i].time).toFixed(1)},${s.y(values[i]).toFixed(1)}`;
      const there = this.points.map((_, i) => corner(i, top));
      const back = this.points.map((_, i) => corner(i, floor)).reverse();
      if (there.length === 1) { // a single moment is drawn as a bar
        const x = s.x(this.points[0].time);
        there.push(`${x - 8},${s.y(top[0])}`);
        back.unshift(`${x - 8},${s.y(floor[0])}`);
      }
      this.svg.append(makeSvg("polygon", { points: [...there, ...back].join(" "), fill: this.colours.get(name), opacity: 0.85 }));
      top.forEach((value, i) => { floor[i] = value; });
    }
  }

  point(event) {
    if (!this.points.length) return;
    const s = this.scale(), box = this.svg.getBoundingClientRect();
    const time = s.back((event.clientX - box.left) * s.width / box.width);
    let near = this.points[0];
    for (const point of this.points) if (Math.abs(point.time - time) < Math.abs(near.time - time)) near = point;
    const lines = this.names().map((name) => {
      const value = near.values[name];
      return `${name}: ${value === null || value === undefined ? "–" : this.options.text(value)}`;
    });
    this.tip.textContent = [clock(near.time), ...lines].join("\n");
    this.tip.hidden = false;
    const x = s.x(near.time) * box.width / s.width;
    this.tip.style.left = Math.max(0, Math.min(x + 10, box.width - this.tip.offsetWidth)) + "px";
    this.tip.style.top = "8px";
  }
}
