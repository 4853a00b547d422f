"use strict";
// Rollouts are untrusted text: everything below reaches the page through textContent only.
const data = JSON.parse(document.getElementById("data").textContent);

function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return (value / 1e6).toPrecision(3) + "M";
  if (size >= 1e4) return (value / 1e3).toPrecision(3) + "k";
  if (size && size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(4)));
}

/* ---------- curves ---------- */

const plot = data.plot;
const charts = [...document.querySelectorAll(".panel")].map((figure) => {
  const panel = data.panels[Number(figure.dataset.panel)];
  const lines = [...figure.querySelectorAll(".legend li")];
  const chart = { figure, panel, svg: figure.querySelector(":scope > svg"), at: figure.querySelector(".at"), lines, cursor: figure.querySelector(".cursor"), dots: figure.querySelector(".dots") };
  chart.steps = panel.bands.map((_, band) => {
    const all = new Set();
    for (const line of panel.series) for (const part of line.parts) if (part.band === band) part.steps.forEach((step) => all.add(step));
    return [...all].sort((a, b) => a - b);
  });
  return chart;
});

function nearest(sorted, wanted) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low > 0 && wanted - sorted[low - 1] <= sorted[low] - wanted ? low - 1 : low;
}

const xOf = (band, step) => band.x + (band.high > band.low ? (step - band.low) / (band.high - band.low) : 0.5) * band.width;
function yOf(panel, value) {
  const scale = panel.log ? Math.log10 : Number;
  const share = (scale(value) - scale(panel.low)) / (scale(panel.high) - scale(panel.low));
  return plot.height - plot.bottom - share * (plot.height - plot.top - plot.bottom);
}

function show(chart, bandIndex, step) {
  const band = chart.panel.bands[bandIndex];
  const x = xOf(band, step);
  chart.cursor.removeAttribute("hidden");
  chart.cursor.setAttribute("d", `M${x} ${plot.top}V${plot.height - plot.bottom}`);
  chart.at.textContent = `${band.stage} · step ${step}`;
  chart.dots.replaceChildren();
  chart.panel.series.forEach((line, index) => {
    const part = line.parts.find((candidate) => candidate.band === bandIndex);
    const place = part ? nearest(part.steps, step) : -1;
    const found = part && (part.steps[place] === step || chart.panel.series.length > 1);
    chart.lines[index].querySelector("b").textContent = found ? short(part.values[place]) : "–";
    if (!found) return;
    const dot = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    dot.setAttribute("cx", xOf(band, part.steps[place]));
    dot.setAttribute("cy", yOf(chart.panel, part.values[place]));
    dot.setAttribute("r", 3.2);
    dot.setAttribute("class", chart.lines[index].querySelector("path").getAttribute("class").split(" ")[1]);
    chart.dots.append(dot);
  });
}

function rest(chart) {
  chart.cursor.setAttribute("hidden", "");
  chart.dots.replaceChildren();
  chart.at.textContent = "last";
  chart.panel.series.forEach((line, index) => { chart.lines[index].querySelector("b").textContent = line.last; });
}

function point(source, bandIndex, wanted) {
  const step = source.steps[bandIndex][nearest(source.steps[bandIndex], wanted)];
  const stage = source.panel.bands[bandIndex].stage;
  source.where = [bandIndex, step];
  for (const chart of charts) {
    const band = chart.panel.bands.findIndex((candidate) => candidate.stage === stage);
    if (band < 0) rest(chart);
    else show(chart, band, chart === source ? step : chart.steps[band][nearest(chart.steps[band], step)]);
  }
}

const restAll = () => charts.forEach(rest);
for (const chart of charts) {
  rest(chart);
  chart.svg.addEventListener("pointermove", (event) => {
    const box = chart.svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * plot.width;
    const bands = chart.panel.bands;
    let index = bands.findIndex((band) => x <= band.x + band.width + 5);
    if (index < 0) index = bands.length - 1;
    point(chart, index, bands[index].low + ((x - bands[index].x) / bands[index].width) * (bands[index].high - bands[index].low));
  });
  chart.svg.addEventListener("pointerleave", restAll);
  chart.svg.addEventListener("blur", restAll);
  chart.svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const last = chart.panel.bands.length - 1;
    let [band, step] = chart.where || [last, Infinity];
    let place = nearest(chart.steps[band], step) + move;
    if (place < 0 && band > 0) { band -= 1; place = chart.steps[band].length - 1; }
    if (place >= chart.steps[band].length && band < last) { band += 1; place = 0; }
    point(chart, band, chart.steps[band][Math.max(0, Math.min(place, chart.steps[band].length - 1))]);
  });
}

/* ---------- rollouts ---------- */

const LIST_SIZE = 120;
const GRID_LIMIT = 40;
const DIFF_LIMIT = 600;

function asGrid(text) {
  const rows = (text || "").split("\n").map((line) => Array.from(line));
  return rows.length > 1 && rows.length <= GRID_LIMIT && rows[0].length > 0 && rows[0].length <= GRID_LIMIT && rows.every((row) => row.length === rows[0].length) ? rows : null;
}

const at = (grid, row, column) => (grid && grid[row] !== undefined ? grid[row][column] : undefined);

function board(title, rows, columns, cellOf) {
  const grid = make("div", { class: "board" + (columns > 16 ? " small" : ""), "aria-hidden": "true" });
  grid.style.gridTemplateColumns = `repeat(${columns}, max-content)`;
  const spoken = [];
  for (let row = 0; row < rows; row += 1) {
    let line = "";
    for (let column = 0; column < columns; column += 1) {
      const [text, kind] = cellOf(row, column);
      const look = text === "#" ? " wall" : text === "_" || text === "." || text === " " ? " floor" : "";
      grid.append(make("span", { class: `cell ${kind}${look}` }, text === undefined ? "?" : text));
      line += text === undefined ? "?" : text;
    }
    spoken.push(line);
  }
  return make("figure", { role: "img", "aria-label": `${title}: ${spoken.join(" / ")}` }, make("figcaption", {}, title), grid);
}

function gridTurn(turn, truth) {
  const before = asGrid(turn.before);
  const guess = (turn.prediction || "").split("\n").map((line) => Array.from(line));
  const rows = Math.max(truth.length, Math.min(guess.length, GRID_LIMIT));
  const columns = Math.max(truth[0].length, Math.min(Math.max(...guess.map((line) => line.length)), GRID_LIMIT));
  let wrong = 0;
  const state = (row, column) => {
    const isWrong = at(guess, row, column) !== at(truth, row, column);
    const changed = before && at(before, row, column) !== at(truth, row, column);
    return { isWrong, changed };
  };
  for (let row = 0; row < rows; row += 1) for (let column = 0; column < columns; column += 1) wrong += state(row, column).isWrong ? 1 : 0;
  const boards = make("div", { class: "grids" });
  if (before) boards.append(board("True state before", before.length, before[0].length, (row, column) => [at(before, row, column), ""]));
  boards.append(
    board("Prediction", rows, columns, (row, column) => [at(guess, row, column), state(row, column).isWrong ? "wrong" : state(row, column).changed ? "changed" : ""]),
    board("Truth", truth.length, truth[0].length, (row, column) => [at(truth, row, column), state(row, column).changed ? "changed" : ""]),
    board("Difference", rows, columns, (row, column) => {
      const { isWrong, changed } = state(row, column);
      return isWrong ? ["✗", "miss"] : changed ? ["✓", "hit"] : ["·", "same"];
    }),
  );
  return [boards, wrong];
}

// Longest common subsequence over words; long texts are compared line by line so that the table stays small.
function compare(left, right) {
  const split = (text) => text.match(/\s+|[^\s]+/g) || [];
  let a = split(left), b = split(right);
  if (a.length > DIFF_LIMIT || b.length > DIFF_LIMIT) { a = left.split(/(?<=\n)/); b = right.split(/(?<=\n)/); }
  if (a.length > DIFF_LIMIT || b.length > DIFF_LIMIT) return [[make("span", {}, left)], [make("span", {}, right)]];
  const table = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i -= 1) for (let j = b.length - 1; j >= 0; j -= 1) table[i][j] = a[i] === b[j] ? table[i + 1][j + 1] + 1 : Math.max(table[i + 1][j], table[i][j + 1]);
  const out = [[], []];
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { out[0].push(a[i]); out[1].push(b[j]); i += 1; j += 1; }
    else if (j >= b.length || (i < a.length && table[i + 1][j] >= table[i][j + 1])) { out[0].push(make("del", {}, a[i])); i += 1; }
    else { out[1].push(make("ins", {}, b[j])); j += 1; }
  }
  return out;
}

function textTurn(turn) {
  const [left, right] = turn.truth === undefined ? [[turn.prediction || ""], null] : compare(turn.prediction || "", turn.truth);
  const box = make("div", { class: "texts" }, make("div", {}, make("p", {}, "Prediction"), make("pre", { tabindex: "0" }, ...left)));
  if (right) box.append(make("div", {}, make("p", {}, "Truth"), make("pre", { tabindex: "0" }, ...right)));
  return box;
}

// An answer that foretells no state is shown beside what came of it: there is nothing to hold it against.
function answerTurn(turn) {
  const box = make("div", { class: "texts" });
  for (const [title, text] of [["Answer", turn.answer], ["What the world said then", turn.after]]) {
    if (text !== undefined) box.append(make("div", {}, make("p", {}, title), make("pre", { tabindex: "0" }, text)));
  }
  return box;
}

function boardsOf(turn) {
  const grids = (turn.boards || []).map(asGrid);
  if (!grids.length || grids.includes(null)) return null;
  return make("div", { class: "grids" }, ...grids.map((grid, index) => board(index ? "After" : "Before", grid.length, grid[0].length, (row, column) => [at(grid, row, column), index && at(grids[0], row, column) !== at(grid, row, column) ? "changed" : ""])));
}

function turnView(turn, index) {
  const truth = turn.truth === undefined ? null : asGrid(turn.truth);
  const [body, wrong] = truth ? gridTurn(turn, truth) : [turn.answer === undefined ? textTurn(turn) : answerTurn(turn), null];
  let badge = null;
  if (wrong) badge = make("span", { class: "badge bad" }, `${wrong} ${wrong === 1 ? "cell" : "cells"} wrong`);
  else if (turn.exact === true || (wrong === 0 && turn.exact === undefined)) badge = make("span", { class: "badge good" }, "exact");
  else if (turn.exact === false) badge = make("span", { class: "badge bad" }, "not exact");
  const title = make("h4", {}, `Turn ${index + 1}`, turn.action ? make("span", { class: "badge plainly" }, `action: ${turn.action}`) : null, badge);
  if (turn.reward !== undefined) title.append(make("span", { class: "badge plainly" }, `reward of the world ${short(turn.reward)}`));
  const context = turn.context === undefined ? turn.prompt : turn.context;
  const seen = context ? make("details", {}, make("summary", {}, "What the model saw"), make("pre", { tabindex: "0" }, context)) : null;
  return make("section", { class: "turn" }, title, boardsOf(turn), body, seen);
}

function startBrowser(root) {
  root.hidden = false;
  const grids = data.rollouts.some((item) => item.turns.some((turn) => turn.truth !== undefined && asGrid(turn.truth)));
  root.querySelector(".key-line").hidden = !grids; // the colours of cells mean nothing in a run of texts
  const form = root.querySelector("form");
  const [list, detail, found] = [".list", ".detail", ".found"].map((selector) => root.querySelector(selector));
  const all = data.rollouts;
  all.forEach((item, index) => { item.index = index; });
  const rewards = all.filter((item) => item.reward !== null && !item.invalid).map((item) => item.reward);
  const [best, worst] = [Math.max(...rewards), Math.min(...rewards)];
  const tests = {
    best: (item) => !item.invalid && item.reward === best,
    between: (item) => !item.invalid && item.reward !== null && item.reward < best && item.reward > worst,
    worst: (item) => !item.invalid && item.reward === worst,
    invalid: (item) => Boolean(item.invalid),
  };
  let shown = [], current = null, size = LIST_SIZE;

  const fill = (name, label, options) => {
    const select = form.elements[name];
    if (!select) return;
    const kept = select.value;
    select.replaceChildren(make("option", { value: "" }, label), ...options.map(([value, text]) => make("option", { value }, text)));
    if (options.some(([value]) => String(value) === kept)) select.value = kept;
  };
  const chosen = (name) => (form.elements[name] ? form.elements[name].value : "");
  const fits = (item, skip) => (chosen("run") === "" || item.run === Number(chosen("run"))) && (chosen("stage") === "" || item.stage === chosen("stage")) && (skip === "step" || chosen("step") === "" || item.step === Number(chosen("step")));
  const unique = (values) => [...new Set(values)];
  const rewardText = (item) => (item.invalid ? "invalid" : item.reward === null ? "–" : short(item.reward));
  const marks = (item) => item.turns.slice(0, 12).map((turn) => (turn.exact === true ? "●" : turn.exact === false ? "○" : "")).join("");

  function row(item) {
    const exact = item.turns.filter((turn) => turn.exact === true).length;
    const dots = make("span", { class: "marks", role: "img", "aria-label": `${exact} of ${item.turns.length} turns exact` }, marks(item));
    const where = (data.runs.length > 1 ? data.runs[item.run] + " · " : "") + `${item.stage} · step ${item.step}`;
    const button = make("button", { type: "button", onclick: () => open(item) }, make("span", { class: "who" }, `prompt ${item.prompt} · ${item.sample}`), make("b", {}, rewardText(item)), make("small", {}, where), dots);
    button.dataset.index = item.index;
    return make("li", {}, button);
  }

  function paint() {
    list.replaceChildren(...shown.slice(0, size).map(row));
    if (shown.length > size) list.append(make("li", {}, make("button", { type: "button", onclick: () => { size += LIST_SIZE; paint(); } }, `Show more (${shown.length - size} left)`)));
    mark();
  }

  function mark() {
    for (const button of list.querySelectorAll("button")) button.setAttribute("aria-current", String(current !== null && Number(button.dataset.index) === current.index && button.dataset.index !== undefined));
  }

  function refresh() {
    const inRun = all.filter((item) => chosen("run") === "" || item.run === Number(chosen("run")));
    fill("stage", "all stages", unique(inRun.map((item) => item.stage)).map((stage) => [stage, stage]));
    fill("step", "all steps", unique(all.filter((item) => fits(item, "step")).map((item) => item.step)).sort((a, b) => a - b).map((step) => [step, String(step)]));
    const wanted = chosen("text").trim().toLowerCase();
    const test = tests[chosen("reward")];
    shown = all.filter((item) => fits(item) && (!test || test(item)) && (!wanted || JSON.stringify([item.prompt, item.invalid, item.turns]).toLowerCase().includes(wanted)));
    size = LIST_SIZE;
    found.textContent = `${shown.length} of ${all.length} rollouts`;
    if (!shown.includes(current)) current = shown[0] || null;
    paint();
    draw();
  }

  function open(item) {
    current = item;
    mark();
    draw();
  }

  function draw() {
    if (!current) { detail.replaceChildren(make("p", { class: "soft" }, "No rollout fits these filters.")); return; }
    const item = current;
    const group = all.filter((other) => other.run === item.run && other.stage === item.stage && other.step === item.step && other.prompt === item.prompt);
    const chips = group.length < 2 ? null : make("div", { class: "chips" }, "All samples of this prompt:", ...group.map((other) => make("button", { type: "button", "aria-current": String(other === item), "aria-label": `sample ${other.sample}, reward ${rewardText(other)}`, onclick: () => open(other) }, rewardText(other))));
    const extra = Object.entries(item.extra).map(([key, value]) => `${key}: ${value}`);
    const meta = [...(data.runs.length > 1 ? [data.runs[item.run]] : []), item.stage, `step ${item.step}`, `sample ${item.sample}`, ...extra].join(" · ");
    detail.replaceChildren(
      make("header", {}, make("h3", {}, `Prompt ${item.prompt}`), make("p", { class: "reward" }, item.invalid ? "invalid" : `reward ${rewardText(item)}`)),
      make("p", { class: "meta" }, meta),
      ...(item.invalid ? [make("p", { class: "badge bad" }, `Not counted: ${item.invalid}`)] : []),
      ...(chips ? [chips] : []),
      ...item.turns.map(turnView),
    );
  }

  list.addEventListener("keydown", (event) => {
    const move = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const buttons = [...list.querySelectorAll("button")];
    const next = buttons[buttons.indexOf(document.activeElement) + move];
    if (!next) return;
    next.focus();
    if (next.dataset.index !== undefined) open(all[Number(next.dataset.index)]);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", refresh);
  fill("run", "all runs", data.runs.map((name, index) => [index, name]));
  const some = (name) => all.some(tests[name]);
  const options = [["best", `highest (${short(best)})`], ["between", "in between"], ["worst", `lowest (${short(worst)})`], ["invalid", "invalid"]];
  fill("reward", "any reward", options.filter(([name]) => some(name) && (name !== "worst" || worst < best)));
  refresh();
}

const browser = document.getElementById("browser");
if (browser) startBrowser(browser);
