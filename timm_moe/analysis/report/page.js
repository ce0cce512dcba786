"use strict";
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#7f7f7f", "#a6761d"];
const read = (id) => JSON.parse(document.getElementById(id).textContent);
const colour = (expert) => COLOURS[expert % COLOURS.length];

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function drawing(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/* A list to choose a layer from; draw is called with each layer that is chosen. */
function layerChoice(layers, draw) {
  const select = element("select", {}, ...layers.map((layer, index) => element("option", { value: index }, layer.name)));
  select.value = layers.length - 1;
  select.addEventListener("change", () => draw(layers[select.value]));
  draw(layers[layers.length - 1]);
  return element("label", {}, "layer ", select);
}

function classTable(place, data, title) {
  const body = element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title });
  const search = element("input", { type: "search", "aria-label": "find a class" });
  search.placeholder = "find a class";
  let layer, sorted = -1, upwards = false;

  function sort(column, up) { sorted = column; upwards = up; }
  function order() {
    const found = data.classes.map((name, index) => index).filter((index) => data.classes[index].toLowerCase().includes(search.value.toLowerCase()));
    if (sorted >= 0) found.sort((a, b) => layer.share[b][sorted] - layer.share[a][sorted]);
    return upwards === (sorted >= 0) ? found.reverse() : found;
  }
  function head(label, column) {
    const button = element("button", { type: "button" }, label);
    button.addEventListener("click", () => { sort(column, column === sorted ? !upwards : column < 0); draw(layer); body.querySelectorAll("thead button")[column + 1].focus(); });
    return element("th", { scope: "col", "aria-sort": sorted === column ? (upwards ? "ascending" : "descending") : "none" }, button);
  }
  function cell(share) {
    const made = element("td", {}, String(share));
    made.style.background = `rgba(0, 114, 178, ${(0.45 * share / 100).toFixed(2)})`;
    return made;
  }
  function draw(chosen) {
    layer = chosen;
    const experts = layer.share[0].map((_, expert) => head(String(expert), expert));
    const rows = order().map((index) => element("tr", {}, element("th", { scope: "row" }, data.classes[index]), ...layer.share[index].map(cell)));
    body.replaceChildren(element("table", { class: "shares" },
      element("caption", {}, `Share in percent; an even share is ${layer.even.toFixed(1)}.`),
      element("thead", {}, element("tr", {}, head("class", -1), ...experts)), element("tbody", {}, ...rows)));
  }
  const choice = layerChoice(data.layers, (chosen) => { sort(-1, true); draw(chosen); });
  search.addEventListener("input", () => draw(layer));
  place.append(element("div", { class: "controls" }, choice, search), body);
}

function patches(place, data) {
  const images = element("div", { class: "images" }), key = element("ul", { class: "key" });
  const shown = element("input", { type: "checkbox", checked: "" });
  shown.addEventListener("change", () => images.classList.toggle("plain", !shown.checked));
  function overlay(layer, image) {
    const [rows, columns] = layer.grid, marks = [], gates = layer.gate.flat();
    const least = Math.min(...gates), most = Math.max(...gates);
    for (let patch = 0; patch < rows * columns; patch++) {
      const expert = layer.expert[image][patch];
      if (expert >= layer.experts) continue;
      const x = patch % columns, y = Math.floor(patch / columns), gate = layer.gate[image][patch];
      marks.push(drawing("rect", { x, y, width: 1, height: 1, fill: colour(expert), "fill-opacity": (0.25 + 0.45 * (gate - least) / Math.max(1, most - least)).toFixed(2) },
        drawing("title", {}, `expert ${expert}, gate ${(gate / 100).toFixed(2)}`)));
      if (columns <= 16) marks.push(drawing("text", { x: x + 0.5, y: y + 0.72, "font-size": 0.6, "text-anchor": "middle", fill: "#ffffff", stroke: "#000000", "stroke-width": 0.06, "paint-order": "stroke" }, String(expert)));
    }
    return marks;
  }
  function draw(layer) {
    const [rows, columns] = layer.grid;
    images.replaceChildren(...data.images.map((source, image) => element("figure", {},
      drawing("svg", { viewBox: `0 0 ${columns} ${rows}`, role: "img", "aria-label": `${data.labels[image]}: patches by expert` },
        drawing("image", { href: source, width: columns, height: rows, preserveAspectRatio: "none" }), ...overlay(layer, image)),
      element("figcaption", {}, data.labels[image]))));
    const used = new Set(layer.expert.flat().filter((expert) => expert < layer.experts));
    key.replaceChildren(...[...used].sort((a, b) => a - b).map((expert) => {
      const mark = element("i", { "aria-hidden": "true" });
      mark.style.background = colour(expert);
      return element("li", {}, mark, `expert ${expert}`);
    }));
  }
  const choice = layerChoice(data.layers, draw);
  place.append(element("div", { class: "controls" }, choice, element("label", {}, shown, " experts")), key, images);
}

function surest(place, data) {
  const CELL = 48, list = element("div", { class: "surest" });
  function draw(layer) {
    list.replaceChildren(...layer.told.flatMap((told, row) => {
      const strip = element("div", { class: "strip", role: "img", "aria-label": `${layer.rows[row]}: ${told}` });
      strip.style.cssText = `background-image: url(${layer.sheet}); background-position: 0 ${100 * row / Math.max(1, layer.told.length - 1)}%; max-width: ${CELL * layer.columns}px; aspect-ratio: ${layer.columns}`;
      return [element("div", {}, element("strong", {}, layer.rows[row]), element("br"), told), strip];
    }));
  }
  const choice = layerChoice(data.layers, draw);
  place.append(element("div", { class: "controls" }, choice), list);
}

const KINDS = { classes: classTable, patches, surest };
for (const place of document.querySelectorAll(".routes")) {
  const data = read(place.dataset.routes);
  KINDS[data.kind](place, data, place.dataset.title);
}

const config = read("config"), charts = [];
for (const place of document.querySelectorAll(".chart"))
  charts.push(vegaEmbed(place, read(place.dataset.spec), { config, actions: false, renderer: "svg" }));
window.drawn = Promise.all(charts);

const theme = document.getElementById("theme");
function show(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  theme.setAttribute("aria-pressed", String(dark));
}
theme.addEventListener("click", () => show(document.documentElement.dataset.theme !== "dark"));
show(window.matchMedia("(prefers-color-scheme: dark)").matches);
