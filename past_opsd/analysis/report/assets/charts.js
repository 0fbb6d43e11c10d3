"use strict";
// The values of a chart: under the pointer, at a tap, or with the arrow keys.
(() => {
  const tip = document.getElementById("tip");
  const known = new WeakMap();
  let shown = null;  // { svg, index, held }

  const chart = (target) => (target instanceof Element ? target.closest("svg[data-hover]") : null);
  function content(svg) {
    if (!known.has(svg)) known.set(svg, JSON.parse(svg.dataset.hover));
    return known.get(svg);
  }

  function distance([kind, , , places], at) {
    if (kind === "area") {
      const [[left, top], [right, bottom]] = places;
      return Math.hypot(Math.max(left - at.x, 0, at.x - right), Math.max(top - at.y, 0, at.y - bottom));
    }
    // Columns are told apart by x alone; points by both.
    return Math.min(...places.map(([x, y]) => Math.hypot(at.x - x, kind === "column" ? 0 : at.y - y)));
  }
  function nearest(svg, event) {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const gaps = content(svg).spots.map((spot) => distance(spot, at));
    return gaps.indexOf(Math.min(...gaps));
  }

  function element(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }
  function drawn(tag, attributes) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  }

  function mark(svg, [kind, , rows, places]) {
    const { keys, frame } = content(svg);
    const group = drawn("g", { class: "found", "aria-hidden": "true" });
    if (kind === "area") {
      const [[x, y], [right, bottom]] = places;
      group.append(drawn("rect", { x, y, width: right - x, height: bottom - y, rx: 3 }));
    } else {
      if (kind === "column") group.append(drawn("path", { d: `M${places[0][0]} ${frame[0][1]}V${frame[1][1]}` }));
      places.forEach(([cx, cy], i) => {
        const dot = drawn("circle", { cx, cy, r: 3.6 });
        dot.style.fill = `var(--${keys[rows[i][0]][1] || "fg"})`;
        group.append(dot);
      });
    }
    svg.append(group);
  }

  function show(svg, index, held) {
    if (shown && shown.svg === svg && shown.index === index) { shown.held = shown.held || held; return; }
    hide();
    const { keys, spots } = content(svg);
    if (!spots[index]) return;
    const [, title, rows] = spots[index];
    shown = { svg, index, held };
    mark(svg, spots[index]);
    tip.replaceChildren(element("b", {}, title), ...rows.map(([key, value]) => {
      const [label, colour] = keys[key];
      const swatch = element("i", {});
      if (colour) swatch.style.background = `var(--${colour})`;
      return element("p", {}, swatch, element("span", {}, label), " ", element("span", { class: "num" }, value));
    }));
    tip.hidden = false;
    put();
  }

  function put() {
    if (!shown) return;
    if (!shown.svg.isConnected) { hide(); return; }
    const [kind, , , places] = content(shown.svg).spots[shown.index];
    const [left, top] = [Math.max, Math.min].map((pick, i) => pick(...places.map((place) => place[i])));
    const x = kind === "area" ? (places[0][0] + places[1][0]) / 2 : left;
    const at = new DOMPoint(x, top).matrixTransform(shown.svg.getScreenCTM());
    const size = tip.getBoundingClientRect(), width = document.documentElement.clientWidth;
    const beside = kind === "area" ? at.x - size.width / 2 : at.x + 14 + size.width < width ? at.x + 14 : at.x - size.width - 14;
    const above = kind === "area" ? at.y - size.height - 6 : at.y - size.height / 2;
    tip.style.left = `${Math.max(8, Math.min(beside, width - size.width - 8))}px`;
    tip.style.top = `${Math.max(8, Math.min(above, innerHeight - size.height - 8))}px`;
  }

  function hide() {
    if (!shown) return;
    shown.svg.querySelector(".found")?.remove();
    shown = null;
    tip.hidden = true;
  }

  document.addEventListener("pointermove", (event) => {
    if (event.pointerType === "touch") return;
    const svg = chart(event.target);
    if (svg) show(svg, nearest(svg, event), false);
    else if (shown && !shown.held) hide();
  });
  document.addEventListener("click", (event) => {
    const svg = chart(event.target);
    if (svg) show(svg, nearest(svg, event), true);
    else hide();
  });
  document.addEventListener("focusin", (event) => {
    const svg = chart(event.target);
    if (svg && svg.matches(":focus-visible")) show(svg, content(svg).spots.length - 1, true);
  });
  document.addEventListener("focusout", (event) => { if (chart(event.target)) hide(); });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { hide(); return; }
    const svg = chart(event.target);
    if (!svg || event.altKey || event.ctrlKey || event.metaKey) return;
    const last = content(svg).spots.length - 1, at = shown && shown.svg === svg ? shown.index : last;
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    show(svg, Math.max(0, Math.min(last, to)), true);
  });
  addEventListener("scroll", put, { passive: true, capture: true });
  addEventListener("resize", put);
})();
