// How is one chart drawn? uPlot with our colours, dashes, legend, zoom and keys. Text only by textContent.

const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [14, 4], [4, 2, 1, 2]];
const PIXELS = globalThis.devicePixelRatio || 1;

function numberText(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return Number(value.toPrecision(3)).toExponential();
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(size >= 1 ? 4 : 3)));
}

// Exponential mean of the values so far; weight 0 leaves them as they are.
function smoothed(values, weight) {
  let mean = null;
  return values.map((value) => {
    if (value === null || !weight) return value;
    mean = mean === null ? value : weight * mean + (1 - weight) * value;
    return mean;
  });
}

// 0.00047 -> 0.0004
function oneDigitBelow(value) {
  const [digits, power] = value.toExponential().split("e");
  return Number(`${Math.floor(Number(digits))}e${power}`);
}

function sample(colour, dash) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 24 8");
  svg.setAttribute("class", "artnb-sample");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  for (const [name, value] of Object.entries({ x1: 0, x2: 24, y1: 4, y2: 4, "stroke-width": 2.5 })) line.setAttribute(name, value);
  line.style.stroke = colour;
  line.setAttribute("stroke-dasharray", dash.join(" "));
  svg.append(line);
  return svg;
}

// spec: {id, title, isCompared, series: [[metric, words, run]]}, of one run, or one metric of several runs;
// shared: {root, log, smoothing, zoom, syncKey, onZoom(range)}.
class Chart {
  constructor(spec, shared) {
    this.spec = spec;
    this.shared = shared;
    this.hidden = new Set();
    this.isReward = spec.id === "reward";
    this.isBanded = this.isReward && !spec.isCompared;
    this.isStacked = spec.id === "time" && !spec.isCompared;
    this.element = make("figure", this.isReward ? "artnb-chart artnb-wide" : "artnb-chart");
    this.element.tabIndex = 0;
    this.element.setAttribute("role", "group");
    this.element.setAttribute("aria-label", `${spec.title}: chart; arrow keys read it step by step, plus and minus zoom, 0 shows all`);
    this.plotBox = make("div", "artnb-plot");
    this.legend = make("div", "artnb-legend");
    this.at = make("span", "artnb-at");
    const caption = make("figcaption");
    caption.append(make("span", "", spec.title), this.at);
    this.element.append(caption, this.plotBox, this.legend);
    this.element.addEventListener("keydown", (event) => this.key(event));
    this.resizing = new ResizeObserver(() => this.plot && this.plot.setSize(this.size()));
    this.resizing.observe(this.plotBox);
  }

  size() {
    return { width: Math.max(160, this.plotBox.clientWidth), height: this.isReward ? 260 : 150 };
  }

  colour(name) {
    return getComputedStyle(this.shared.root).getPropertyValue(name).trim();
  }

  // picture: {steps: [x], value(metric, run) -> [y], baselines: {name: y}, checks: [{step, mean, low, high, run}]}
  update(picture) {
    this.picture = picture;
    const raw = this.spec.series.map(([metric, , run]) => picture.value(metric, run));
    this.raw = raw;
    // what is never positive has no logarithm: it stays as it is
    this.isLog = this.shared.log && !this.isStacked && raw.some((values) => values.some((value) => value > 0));
    const shown = raw.map((values, index) => (this.hidden.has(index) ? values.map(() => null) : values));
    const data = [picture.steps, ...(this.isBanded ? this.rewardData(shown) : this.plainData(shown))];
    const key = `${this.isLog}/${this.isBanded && this.shared.smoothing > 0}`;
    if (!this.plot || this.key_ !== key) {
      if (this.plot) this.plot.destroy();
      this.key_ = key;
      this.plot = new uPlot(this.options(), data, this.plotBox);
      this.drawLegend();
    }
    const zoom = this.shared.zoom;
    this.plot.setData(data, !zoom);
    if (zoom) this.plot.setScale("x", { min: zoom[0], max: zoom[1] });
    this.readLegend(null);
  }

  plainData(shown) {
    if (!this.isStacked) return shown.map((values) => this.onScale(smoothed(values, this.shared.smoothing)));
    const sums = [];
    shown.forEach((values, index) => sums.push(values.map((value, i) => (value || 0) + (index ? sums[index - 1][i] : 0))));
    return sums;
  }

  rewardData(shown) {
    const [mean, best] = shown;
    const weight = this.shared.smoothing;
    const low = this.picture.value("band_low"), high = this.picture.value("band_high");
    return [smoothed(mean, weight), best, high, low, weight ? mean : mean.map(() => null)].map((values) => this.onScale(values));
  }

  onScale(values) {
    return this.isLog ? values.map((value) => (value > 0 ? value : null)) : values;
  }

  options() {
    const text = () => this.colour("--artnb-quiet"), grid = () => this.colour("--artnb-grid");
    const axis = { stroke: text, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const line = (index) => ({
      stroke: () => this.colour(`--artnb-c${index % 6}`),
      dash: DASHES[index % DASHES.length],
      width: 1.75,
      spanGaps: true,
      points: { size: 4 },
    });
    let series = this.spec.series.map((_, index) => line(index)), bands = [];
    if (this.isBanded) {
      const edge = { stroke: "transparent", points: { show: false }, spanGaps: false };
      const faint = { stroke: () => this.colour("--artnb-faint"), width: 1, spanGaps: true, points: { show: false } };
      series = [{ ...line(0), width: 2.5 }, { ...line(1), points: { show: false } }, edge, edge, faint];
      bands = [{ series: [3, 4], fill: () => this.colour("--artnb-band") }];
    } else if (this.isStacked) {
      series = series.map((one, index) => ({ ...one, points: { show: false }, ...(index ? {} : { fill: () => this.colour("--artnb-f0") }) }));
      bands = series.slice(1).map((_, index) => ({ series: [index + 2, index + 1], fill: () => this.colour(`--artnb-f${(index + 1) % 6}`) }));
    }
    const isLog = this.isLog;
    return {
      ...this.size(),
      padding: [8, 10, 0, 0],
      series: [{}, ...series],
      bands,
      scales: { x: { time: false, range: (_, min, max) => (min === max ? [min - 1, max + 1] : [min, max]) }, y: { distr: isLog ? 3 : 1, range: (_, min, max) => this.range(min, max, isLog) } },
      axes: [
        { ...axis, size: 26, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000] },
        { ...axis, size: 56, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : numberText(tick))) },
      ],
      legend: { show: false },
      cursor: {
        y: false,
        sync: { key: this.shared.syncKey, setSeries: false, filters: { pub: (kind) => kind === "mousemove" || kind === "mouseleave" } },
        drag: { x: true, y: false, setScale: false },
        points: { size: 7 },
        bind: { dblclick: () => () => this.shared.onZoom(null) },
      },
      hooks: {
        setSelect: [(plot) => this.select(plot)],
        setCursor: [(plot) => this.readLegend(plot.cursor.idx)],
        draw: [(plot) => this.isReward && this.drawMarks(plot)],
      },
    };
  }

  range(min, max, isLog) {
    if (min === null || max === null) return isLog ? [0.1, 1] : [0, 1];
    if (this.isReward && !isLog) {
      const marks = [...Object.values(this.picture.baselines), ...this.picture.checks.flatMap((c) => [c.low ?? c.mean, c.high ?? c.mean])];
      min = Math.min(min, ...marks);
      max = Math.max(max, ...marks);
    }
    // one digit: from another start uPlot's marks of a logarithmic axis may never reach its end
    if (isLog) return [oneDigitBelow(min / 1.1), max * 1.2];
    if (this.isStacked) min = 0;
    const size = Math.max(Math.abs(min), Math.abs(max));
    const room = max - min > 1e-9 * size ? max - min : size || 1; // a smoothed constant differs by rounding alone
    return [this.isStacked ? 0 : min - 0.06 * room, max + 0.06 * room];
  }

  select(plot) {
    if (plot.select.width < 4) return;
    const from = plot.posToVal(plot.select.left, "x"), to = plot.posToVal(plot.select.left + plot.select.width, "x");
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.shared.onZoom([from, to]);
  }

  zoomTo(range) {
    if (!this.plot || !this.picture.steps.length) return;
    const steps = this.picture.steps;
    const [min, max] = range || [steps[0], steps[steps.length - 1]];
    this.plot.setScale("x", { min, max });
  }

  // Baselines as dashed lines with their names, evaluations as diamonds with whiskers.
  drawMarks(plot) {
    const context = plot.ctx, { left, top, width, height } = plot.bbox;
    context.save();
    context.beginPath();
    context.rect(left, top, width, height);
    context.clip();
    context.font = `${11 * PIXELS}px system-ui, sans-serif`;
    context.textAlign = "left";
    context.textBaseline = "alphabetic";
    context.lineWidth = 1.25 * PIXELS;
    context.strokeStyle = context.fillStyle = this.colour("--artnb-quiet");
    Object.entries(this.picture.baselines).forEach(([name, level], index) => {
      const y = plot.valToPos(level, "y", true);
      context.setLineDash(DASHES[1 + (index % 4)].map((length) => length * PIXELS));
      context.beginPath();
      context.moveTo(left, y);
      context.lineTo(left + width, y);
      context.stroke();
      context.fillText(`${name.length > 40 ? `${name.slice(0, 39)}…` : name} ${numberText(level)}`, left + 6 * PIXELS, y - 4 * PIXELS);
    });
    context.setLineDash([]);
    context.strokeStyle = context.fillStyle = this.colour("--artnb-c3");
    context.lineWidth = 2 * PIXELS;
    for (const check of this.picture.checks) {
      if (this.spec.isCompared) context.strokeStyle = context.fillStyle = this.colour(`--artnb-c${check.run % 6}`);
      this.drawCheck(plot, context, check);
    }
    context.restore();
  }

  drawCheck(plot, context, check) {
    const x = plot.valToPos(check.step, "x", true), y = plot.valToPos(check.mean, "y", true), r = 5 * PIXELS;
    if (check.low !== null && check.high !== null) {
      const low = plot.valToPos(check.low, "y", true), high = plot.valToPos(check.high, "y", true);
      context.beginPath();
      context.moveTo(x, low);
      context.lineTo(x, high);
      for (const end of [low, high]) {
        context.moveTo(x - r, end);
        context.lineTo(x + r, end);
      }
      context.stroke();
    }
    context.beginPath();
    context.moveTo(x, y - r);
    context.lineTo(x + r, y);
    context.lineTo(x, y + r);
    context.lineTo(x - r, y);
    context.closePath();
    check.is_base ? context.stroke() : context.fill();
  }

  drawLegend() {
    this.readings = this.spec.series.map(([, words], index) => {
      const button = make("button", "artnb-key");
      button.type = "button";
      button.setAttribute("aria-pressed", String(!this.hidden.has(index)));
      const reading = make("b");
      button.append(sample(`var(--artnb-c${index % 6})`, DASHES[index % DASHES.length]), make("span", "", words), reading);
      button.addEventListener("click", () => {
        this.hidden.has(index) ? this.hidden.delete(index) : this.hidden.add(index);
        button.setAttribute("aria-pressed", String(!this.hidden.has(index)));
        this.update(this.picture);
      });
      return [button, reading];
    });
    const marks = this.isBanded ? [make("span", "artnb-mark", "▒ spread within groups")] : [];
    if (this.isReward) marks.push(make("span", "artnb-mark", "◆ evaluation, 95 %"));
    this.legend.replaceChildren(...this.readings.map(([button]) => button), ...marks);
  }

  readLegend(index) {
    if (!this.readings || !this.picture) return;
    const steps = this.picture.steps, isLatest = index === null || index === undefined;
    const place = isLatest ? steps.length - 1 : index;
    this.readings.forEach(([, reading], i) => {
      const values = this.raw[i], last = isLatest ? values.findLastIndex((value) => value !== null) : place;
      reading.textContent = numberText(values[last]);
    });
    this.at.textContent = steps.length ? `step ${steps[place]}` : "";
  }

  key(event) {
    if (event.target !== this.element || !this.plot || !this.picture.steps.length) return;
    const steps = this.picture.steps, last = steps.length - 1;
    const at = this.plot.cursor.idx ?? last;
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last };
    const scale = this.plot.scales.x, middle = steps[at], half = (scale.max - scale.min) / 2;
    if (event.key in moves) {
      const to = Math.min(last, Math.max(0, moves[event.key]));
      this.plot.setCursor({ left: this.plot.valToPos(steps[to], "x"), top: 10 });
    } else if (event.key === "+" || event.key === "=") this.shared.onZoom([middle - half / 2, middle + half / 2]);
    else if (event.key === "-") this.shared.onZoom([Math.max(steps[0], middle - 2 * half), Math.min(steps[last], middle + 2 * half)]);
    else if (event.key === "0" || event.key === "Escape") this.shared.onZoom(null);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  recolour() {
    if (this.plot) this.plot.redraw(false);
  }

  destroy() {
    this.resizing.disconnect();
    if (this.plot) this.plot.destroy();
  }
}
