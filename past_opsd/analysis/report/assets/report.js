"use strict";
(() => {
  const byId = (id) => document.getElementById(id);

  function make(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
    for (const child of children.flat()) if (child !== null && child !== "") element.append(child);
    return element;
  }

  const root = document.documentElement;
  const darkNow = () =>
    root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const toggle = byId("theme");
  const nameTheme = () => { toggle.textContent = darkNow() ? "Light" : "Dark"; };
  toggle.addEventListener("click", () => { root.dataset.theme = darkNow() ? "light" : "dark"; nameTheme(); });
  nameTheme();

  const links = new Map([...document.querySelectorAll(".toc a")].map((a) => [a.getAttribute("href").slice(1), a]));
  const inView = new Set();
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) inView[entry.isIntersecting ? "add" : "delete"](entry.target.id);
    const first = [...links.keys()].find((id) => inView.has(id));
    for (const [id, link] of links) {
      if (id !== first) { link.removeAttribute("aria-current"); continue; }
      if (link.hasAttribute("aria-current")) continue;
      link.setAttribute("aria-current", "true");
      const bar = link.parentElement;
      if (bar.scrollWidth > bar.clientWidth) bar.scrollTo({ left: link.offsetLeft - bar.clientWidth / 2 });
    }
  }, { rootMargin: "-10% 0px -60% 0px" });
  for (const id of links.keys()) watcher.observe(byId(id));

  const data = JSON.parse(byId("trajectory-data").textContent);
  if (!data.trajectories.length) return;

  const STEPS = [0.001, 0.01, 0.03, 0.1, 0.3, 1, 3];
  const level = (whole) => (whole === null ? 7 : STEPS.filter((s) => whole / data.unit >= s).length);
  const number = (whole) => (whole === null ? "not finite" : whole ? (whole / data.unit).toFixed(4) : "< 0.0001");
  const share = (whole) => (whole === null ? "not finite" : whole ? `${(100 * whole / data.unit).toFixed(2)} %` : "< 0.01 %");
  const mean = (value) => (value === null ? "not finite" : value.toFixed(4));
  const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
  const runName = (t) => {
    const run = data.runs[t.run];
    return `${run.method}, seed ${run.seed}`;
  };
  const kind = (r) => (r.correct ? "correct" : r.reason);
  const plain = (name) => name.replaceAll("_", " ");
  const badge = (r) =>
    make("span", { class: `badge ${r.correct ? "yes" : "no"}`, title: data.meanings[kind(r)] || "" }, plain(kind(r)));
  const written = (piece) =>
    piece === "" ? "part of a character" : piece.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");

  const state = { shown: [], current: null, strand: null, token: null, pinned: false };
  const list = byId("list"), detail = byId("detail"), card = byId("card");
  const filters = ["verdict", "cycle", "run"].map((name) => byId(`by-${name}`));
  const search = byId("search");

  function options(select, all, pairs) {
    select.append(make("option", { value: "" }, all), ...pairs.map(([value, text]) => make("option", { value }, text)));
    select.hidden = pairs.length < 2;
  }
  const unique = (values) => [...new Set(values)];
  const classes = Object.keys(data.meanings).filter((name) => data.trajectories.some((t) => !t.correct && t.reason === name));
  options(filters[0], "Any verdict", [["yes", "Correct"], ["no", "Failed"],
    ...(classes.length > 1 ? classes.map((name) => [`is:${name}`, `Failed: ${plain(name)}`]) : [])]);
  options(filters[1], "Any cycle", unique(data.trajectories.map((t) => t.cycle)).sort((a, b) => a - b).map((c) => [c, `Cycle ${c}`]));
  options(filters[2], "Any method", unique(data.trajectories.map((t) => t.run)).map((r) => [r, data.runs[r].method]));

  const haystack = data.trajectories.map((t) =>
    [t.problem, t.text, t.given, t.reason, t.pieces.join("")].join("\n").toLowerCase());

  function matches(t, i) {
    const [verdict, cycle, run] = filters.map((f) => f.value);
    const one = verdict.startsWith("is:") ? !t.correct && t.reason === verdict.slice(3) : t.correct === (verdict === "yes");
    return (!verdict || one) && (!cycle || t.cycle === Number(cycle))
      && (!run || t.run === Number(run)) && haystack[i].includes(search.value.trim().toLowerCase());
  }

  function fillList() {
    state.shown = data.trajectories.filter(matches);
    byId("count").textContent = state.shown.length === data.trajectories.length
      ? plural(state.shown.length, "trajectory").replace("trajectorys", "trajectories")
      : `${state.shown.length} of ${data.trajectories.length} trajectories`;
    list.replaceChildren(...state.shown.map((t) => {
      const value = t.mean_kl === undefined ? `entropy ${mean(t.mean_entropy)}` : `KL ${mean(t.mean_kl)}`;
      const meta = `cycle ${t.cycle} · ${value}${data.runs.length > 1 ? ` · ${data.runs[t.run].method}` : ""}`;
      const button = make("button", { type: "button", "data-id": t.id, title: t.problem },
        make("span", { class: "id" }, t.problem), badge(t), make("span", { class: "meta" }, meta));
      return make("li", {}, button);
    }));
    if (state.shown.length && !state.shown.includes(state.current)) select(state.shown[0]);
    mark();
  }

  function mark() {
    for (const button of list.querySelectorAll("button")) {
      const here = state.current !== null && button.dataset.id === state.current.id;
      button.setAttribute("aria-current", String(here));
      if (here) {
        const top = button.offsetTop - list.offsetTop;
        if (top < list.scrollTop) list.scrollTop = top;
        if (top + button.offsetHeight > list.scrollTop + list.clientHeight) list.scrollTop = top + button.offsetHeight - list.clientHeight;
      }
    }
  }

  function glyphs(piece) {
    const sign = (s, text) => make("span", { class: "ws", "data-s": s }, text);
    if (piece === "") return [sign("▫", "")];
    if (/^ +$/.test(piece)) return [...piece].map(() => make("span", { class: "ws space", "data-s": "·" }, " "));
    return piece.split(/(\n|\t)/).filter((part) => part !== "")
      .map((part) => (part === "\n" ? sign("↵", "\n") : part === "\t" ? sign("⇥", "\t") : part));
  }

  function tokens(strand, values, title) {
    const spans = strand.pieces.map((piece, i) => {
      const heat = values ? ` h${level(values[i])}` : "";
      const clip = strand.clipped && strand.clipped[i] ? " clip" : "";
      return make("span", { class: `tok${heat}${clip}`, "data-i": i, tabindex: i ? -1 : 0 }, glyphs(piece));
    });
    const box = make("div", { class: "tokens", role: "group", "aria-label": title }, spans);
    const place = (event) => event.target.closest(".tok");
    box.addEventListener("pointerover", (event) => {
      if (event.pointerType !== "touch" && place(event)) show(strand, box, Number(place(event).dataset.i), false);
    });
    box.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch" && !state.pinned) hide(); });
    box.addEventListener("click", (event) => {
      if (place(event)) show(strand, box, Number(place(event).dataset.i), true);
    });
    box.addEventListener("focusin", (event) => {
      if (place(event) && event.target.matches(":focus-visible")) show(strand, box, Number(place(event).dataset.i), true);
    });
    box.addEventListener("keydown", (event) => move(event, strand, box));
    return box;
  }

  function move(event, strand, box) {
    const at = Number(event.target.dataset.i);
    if (Number.isNaN(at) || event.altKey || event.ctrlKey || event.metaKey) return;
    const last = strand.pieces.length - 1;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: last, ArrowDown: line(box, at, 1), ArrowUp: line(box, at, -1) }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    focus(strand, box, Math.max(0, Math.min(last, to)));
  }

  function line(box, at, way) {
    const from = box.children[at];
    let best = at, gap = Infinity, top = null;
    for (let i = at + way; i >= 0 && i < box.children.length; i += way) {
      const other = box.children[i];
      if (way * (other.offsetTop - from.offsetTop) <= 4) continue;
      if (top === null) top = other.offsetTop;
      if (Math.abs(other.offsetTop - top) > 4) break;
      const distance = Math.abs(other.offsetLeft - from.offsetLeft);
      if (distance < gap) { gap = distance; best = i; }
    }
    return best;
  }

  function focus(strand, box, i) {
    for (const span of box.querySelectorAll('[tabindex="0"]')) span.tabIndex = -1;
    box.children[i].tabIndex = 0;
    box.children[i].focus();
    show(strand, box, i, true);
  }

  function bars(title, name, entries, own) {
    const items = [];
    for (let j = 0; j < entries.length; j += 2) {
      const text = data.vocabulary[entries[j]];
      const item = make("li", text === own ? { class: "own" } : {}, make("span", {}, written(text)), make("span", {}, share(entries[j + 1])));
      item.style.setProperty("--share", `${100 * entries[j + 1] / data.unit}%`);
      items.push(item);
    }
    return make("div", { class: name }, make("h5", {}, title), make("ol", {}, items));
  }

  function facts(strand, i) {
    const field = (name, text, kind) => make("dd", { "data-field": name, class: kind || "" }, text);
    const rows = [];
    if (strand.kl) rows.push(make("dt", {}, "KL(teacher ‖ student)"), field("kl", number(strand.kl[i]), "wide"));
    if (strand.clipped) {
      rows.push(make("dt", {}, `clipped entries, τ = ${data.runs[state.current.run].tau}`), field("clipped", String(strand.clipped[i]), "wide"));
    }
    if (strand.p) {
      const two = Boolean(strand.q), kind = two ? "" : "wide";
      rows.push(make("dt", {}, ""), make("dd", { class: `head ${kind}` }, "student"));
      if (two) rows.push(make("dd", { class: "head" }, "teacher"));
      rows.push(make("dt", {}, "probability of the token"), field("student", share(strand.p[i]), kind));
      if (two) rows.push(field("teacher", share(strand.q[i])));
      rows.push(make("dt", {}, "entropy, nats"), field("entropy", number(strand.entropy[i]), kind));
      if (two) rows.push(field("teacher-entropy", number(strand.teacher_entropy[i])));
    }
    return make("dl", {}, rows);
  }

  function show(strand, box, i, pin, anchor) {
    const span = box.children[i];
    if (state.span) state.span.classList.remove("on");
    span.classList.add("on");
    Object.assign(state, { strand, box, span, anchor: anchor || span, token: i, pinned: pin });
    const close = make("button", { type: "button", class: "close" }, "Close");
    close.addEventListener("click", hide);
    const head = make("header", {}, make("span", { class: "what", "data-field": "token" }, written(strand.pieces[i])),
      make("span", { class: "where", "data-field": "position" }, `token ${i + 1} of ${strand.length.toLocaleString("en")}`), close);
    const parts = [head];
    if (strand.kl || strand.p) parts.push(facts(strand, i));
    if (strand.top) {
      const lists = [bars("likeliest for the student", "student", strand.top[i], strand.pieces[i])];
      if (strand.teacher_top) lists.push(bars("likeliest for the teacher", "teacher", strand.teacher_top[i], strand.pieces[i]));
      parts.push(make("div", { class: lists.length > 1 ? "bars" : "bars alone" }, lists));
    }
    card.replaceChildren(...parts);
    card.hidden = false;
    put();
    if (pin && strand === state.current) link();
  }

  function put() {
    if (card.hidden || !state.span) return;
    const at = state.anchor.getClientRects()[0] || state.anchor.getBoundingClientRect();
    const size = card.getBoundingClientRect();
    const below = at.bottom + 8 + size.height < innerHeight;
    card.style.left = `${Math.max(12, Math.min(at.left, root.clientWidth - size.width - 12))}px`;
    card.style.top = `${below ? at.bottom + 8 : Math.max(8, at.top - size.height - 8)}px`;
    const frame = state.anchor.parentElement.getBoundingClientRect();
    const seen = at.bottom > Math.max(0, frame.top) && at.top < Math.min(innerHeight, frame.bottom);
    card.classList.toggle("away", !seen);
  }

  function hide() {
    card.hidden = true;
    if (state.span) state.span.classList.remove("on");
    Object.assign(state, { span: null, token: null, pinned: false });
  }

  function strip(strand, values, box) {
    const bins = Math.min(values.length, 180), size = values.length / bins;
    const columns = Array.from({ length: bins }, (_, b) => {
      let best = Math.floor(b * size);
      for (let i = best; i < Math.floor((b + 1) * size); i += 1) if (values[i] > values[best]) best = i;
      const column = make("i", { "data-i": best });
      column.style.height = `${Math.max(3, 100 * Math.min(1, Math.sqrt(values[best] / data.unit / 3)))}%`;
      return column;
    });
    const element = make("div", { class: "strip", "aria-hidden": "true" }, columns);
    element.addEventListener("pointerover", (event) => {
      const i = event.target.dataset.i;
      if (i && event.pointerType !== "touch") show(strand, box, Number(i), false, event.target);
    });
    element.addEventListener("pointerleave", () => { if (!state.pinned) hide(); });
    element.addEventListener("click", (event) => {
      if (event.target.dataset.i) focus(strand, box, Number(event.target.dataset.i));
    });
    return element;
  }

  function legend(measure, clips) {
    const scale = make("span", { class: "scale" }, STEPS.map((step, i) => {
      const swatch = make("span", {}, String(step));
      swatch.style.setProperty("--swatch", `var(--h${i + 1})`);
      return swatch;
    }));
    const name = measure === "kl" ? "KL(teacher ‖ student) in nats, from" : "student entropy in nats, from";
    return make("div", { class: "legend" }, make("span", {}, name), scale,
      clips ? make("span", {}, make("span", { class: "tok clip" }, "dotted"), " an entry is clipped") : null);
  }

  function summary(t) {
    const fact = (name, value) => make("span", {}, `${name} `, make("b", {}, value));
    const parts = [make("span", { class: "means" }, make("b", {}, plain(kind(t))), `: ${data.meanings[kind(t)] || ""}`)];
    if (t.mean_kl !== undefined) parts.push(fact("mean KL", mean(t.mean_kl)));
    parts.push(fact("mean entropy", mean(t.mean_entropy)));
    if (t.clipped) {
      const hit = t.clipped.filter((n) => n > 0).length;
      parts.push(fact("positions with a clipped entry", `${(100 * hit / t.clipped.length).toFixed(1)} % (${hit} of ${t.clipped.length})`));
    }
    parts.push(fact("answer", t.given === "" ? "none" : t.given), fact("reference", t.answer));
    return make("p", { class: "facts" }, parts);
  }

  function cut(strand) {
    const notes = [];
    if (strand.length > strand.pieces.length) {
      notes.push(`Shown are the first ${strand.pieces.length.toLocaleString("en")} of ${strand.length.toLocaleString("en")} tokens.`);
    }
    if (!strand.finished) notes.push("The token limit cut this response.");
    return notes.length ? make("p", { class: "note" }, notes.join(" ")) : null;
  }

  function recorded(strand) {
    if (strand.recorded === undefined) return null;
    return make("div", {}, make("h4", {}, "Recorded text, which the tokens do not spell"), make("div", { class: "prose recorded" }, strand.recorded));
  }

  function continuation(c, n) {
    const head = make("summary", {}, make("span", {}, `Continuation ${n + 1}`), badge(c),
      c.kl ? make("span", {}, "mean KL ", make("b", {}, mean(c.mean_kl))) : null,
      make("span", {}, plural(c.length, "token")), c.discarded ? make("span", {}, "first draw, discarded") : null);
    const box = make("details", { class: "strand" }, head);
    box.addEventListener("toggle", () => {
      if (!box.open || box.children.length > 1) return;
      for (const part of [tokens(c, c.kl || null, `Continuation ${n + 1}`), cut(c), recorded(c)]) if (part) box.append(part);
    });
    return box;
  }

  function select(t) {
    hide();
    state.current = t;
    const values = t.kl || t.entropy;
    const box = tokens(t, values, "The student's attempt");
    const parts = [
      make("header", {}, make("h3", {}, t.problem), badge(t), make("p", {}, `cycle ${t.cycle} · ${runName(t)} · ${plural(t.length, "token")}`)),
      make("h4", {}, "Problem"), make("div", { class: "prose" }, t.text),
      make("details", {}, make("summary", {}, "Reference solution"), make("div", { class: "prose" }, t.solution)),
      make("h4", {}, t.kl ? "The student's attempt, as its teacher reads it" : "The student's attempt; this method has no teacher"),
      strip(t, values, box), box, cut(t), recorded(t), legend(t.kl ? "kl" : "entropy", Boolean(t.clipped)), summary(t),
    ];
    if (t.continuations.length) {
      const count = t.drawn > t.continuations.length ? `${t.continuations.length} of ${t.drawn}` : String(t.drawn);
      parts.push(make("h4", {}, `The teacher's continuations (${count})`), ...t.continuations.map(continuation));
    }
    detail.replaceChildren(...parts.filter((part) => part !== null));
    mark();
  }

  function link() {
    const token = state.token === null ? "" : `.${state.token}`;
    history.replaceState(null, "", `#t-${state.current.id}${token}`);
  }

  function fromHash() {
    const found = /^#t-(.+?)(?:\.(\d+))?$/.exec(decodeURIComponent(location.hash));
    const t = found && data.trajectories.find((other) => other.id === found[1]);
    if (!t) return false;
    for (const f of filters) f.value = "";
    search.value = "";
    select(t);
    fillList();
    byId("trajectories").scrollIntoView();
    const box = detail.querySelector(".tokens");
    if (found[2] !== undefined && Number(found[2]) < t.pieces.length) focus(t, box, Number(found[2]));
    return true;
  }

  function step(way) {
    const at = state.shown.indexOf(state.current) + way;
    if (at < 0 || at >= state.shown.length) return;
    select(state.shown[at]);
    link();
  }

  list.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    select(data.trajectories.find((t) => t.id === button.dataset.id));
    link();
  });
  for (const control of [search, ...filters]) control.addEventListener("input", fillList);
  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    if (event.key === "Escape") hide();
    if (event.key === "j") step(1);
    if (event.key === "k") step(-1);
  });
  document.addEventListener("pointerdown", (event) => {
    if (!event.target.closest(".tok, .card, .strip")) hide();
  });
  addEventListener("scroll", put, { passive: true, capture: true });
  addEventListener("resize", put);
  addEventListener("hashchange", fromHash);
  if (!fromHash()) {
    const failed = data.trajectories.filter((t) => !t.correct);
    select(failed.find((t) => t.continuations.length) || failed[0] || data.trajectories[0]);
    fillList();
  }
})();
