// The loss chart: an SVG that is redrawn when its data or its width changes.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 240;
const MOST_TICKS = 50;
const LEFT = 44, RIGHT = 12, TOP = 10, BOTTOM = 26;

function shape(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

export function ticks(low, high, most) {
  const rough = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
  const found = [];
  // The limit on ticks ends the loop when adding a step to a huge number does not change it.
  for (let tick = Math.ceil(low / step) * step; tick <= high + step / 1e6 && found.length < MOST_TICKS; tick += step) {
    found.push(tick);
  }
  return { found, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}

function median(values) {
  return [...values].sort((one, other) => one - other)[Math.floor(values.length / 2)];
}

export class LossChart {
  constructor(place, output) {
    this.place = place;
    this.output = output;
    this.data = { training: [], held_out: [] };
    this.cursor = null;
    new ResizeObserver(() => this.draw()).observe(place);
  }

  show(data) {
    this.data = data;
    this.draw();
  }

  draw() {
    const { training, held_out: heldOut } = this.data;
    const all = [...training, ...heldOut];
    const width = this.place.clientWidth;
    if (!all.length || !width) return this.place.replaceChildren();
    const steps = all.map(([step]) => step), losses = all.map(([, loss]) => loss);
    let [left, right] = [Math.min(...steps), Math.max(...steps)];
    if (right - left < 1) right = left + 1;
    // A single peer that claims a huge loss must not flatten the curve.
    let [low, high] = [Math.min(...losses), Math.min(Math.max(...losses), 4 * median(losses))];
    const margin = 0.06 * (high - low) || 0.1;
    [low, high] = [Math.max(0, low - margin), high + margin];
    const x = (step) => LEFT + ((step - left) / (right - left)) * (width - LEFT - RIGHT);
    const y = (loss) => TOP + ((high - Math.min(loss, high)) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    this.scale = { x, steps: [...new Set(steps)].sort((one, other) => one - other) };

    const last = (points) => (points.length ? points.at(-1)[1].toFixed(3) : "not known");
    const label = `Loss by outer step. Training: ${last(training)} last. Held-out: ${last(heldOut)} last.`;
    const svg = shape("svg", {
      viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img", tabindex: "0", "aria-label": label,
    });
    const rows = ticks(low, high, 5), columns = ticks(left, right, Math.min(10, width / 70));
    for (const tick of rows.found) {
      svg.append(shape("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }));
      svg.append(shape("text", { x: LEFT - 8, y: y(tick) + 4, "text-anchor": "end" }, tick.toFixed(rows.digits)));
    }
    for (const tick of columns.found.filter(Number.isInteger)) {
      svg.append(shape("text", { x: x(tick), y: HEIGHT - 8, "text-anchor": "middle" }, String(tick)));
    }
    for (const [name, points] of [["training", training], ["held-out", heldOut]]) {
      const path = points.map(([step, loss]) => `${x(step).toFixed(1)},${y(loss).toFixed(1)}`).join(" ");
      if (points.length > 1) svg.append(shape("polyline", { class: name, points: path }));
    }
    if (training.length === 1) {
      svg.append(shape("circle", { class: "training", cx: x(training[0][0]), cy: y(training[0][1]), r: 2.5 }));
    }
    if (heldOut.length <= 60) {
      for (const [step, loss] of heldOut) svg.append(shape("circle", { class: "held-out", cx: x(step), cy: y(loss), r: 3.2 }));
    }
    this.line = shape("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    svg.append(this.line);
    svg.addEventListener("pointermove", (event) => this.point(event.clientX - svg.getBoundingClientRect().left));
    svg.addEventListener("pointerleave", () => this.read(null));
    svg.addEventListener("keydown", (event) => this.press(event));
    const hadFocus = this.place.contains(document.activeElement);
    this.place.replaceChildren(svg);
    if (hadFocus) svg.focus();
    this.read(this.cursor);
  }

  point(at) {
    const near = this.scale.steps.reduce((best, step) =>
      Math.abs(this.scale.x(step) - at) < Math.abs(this.scale.x(best) - at) ? step : best);
    this.read(near);
  }

  press(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const { steps } = this.scale;
    const place = this.cursor === null ? steps.length - 1 : steps.indexOf(this.cursor) + move;
    this.read(steps[Math.max(0, Math.min(steps.length - 1, place))]);
  }

  read(step) {
    this.cursor = step;
    this.line.setAttribute("visibility", step === null ? "hidden" : "visible");
    const newest = this.data.held_out.at(-1);
    if (step === null) {
      this.output.textContent = newest ? `held-out ${newest[1].toFixed(3)} after outer step ${newest[0]}` : "";
      return;
    }
    this.line.setAttribute("x1", this.scale.x(step));
    this.line.setAttribute("x2", this.scale.x(step));
    const before = (points) => points.filter(([at]) => at <= step).at(-1);
    const parts = [`outer step ${step}`];
    const training = before(this.data.training), heldOut = before(this.data.held_out);
    if (training) parts.push(`training ${training[1].toFixed(3)}`);
    if (heldOut) parts.push(`held-out ${heldOut[1].toFixed(3)}`);
    this.output.textContent = parts.join(", ");
  }
}
