"use strict";
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const POLICIES = DATA.policies;
  const byId = (id) => document.getElementById(id);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const charts = new Map();
  let current = POLICIES.length - 1;
  let chosen = null;
  let printing = false;
  let order = { key: "seconds", down: true };

  // ---------------------------------------------------------------- words
  const milliseconds = (s) => (s === null || s === undefined ? "" : Math.abs(s) < 1e-3 ? (s * 1e6).toFixed(1) + " µs" : (s * 1e3).toFixed(3) + " ms");
  const bytes = (n) => (n < 1024 ? n + " B" : n < 1048576 ? (n / 1024).toFixed(1) + " KiB" : n < 1073741824 ? (n / 1048576).toFixed(1) + " MiB" : (n / 1073741824).toFixed(2) + " GiB");
  const micro = (s) => s.replace(/(\d) us\b/g, "$1 µs");
  const percent = (x) => (100 * x).toFixed(1) + " %";
  const clip = (s, n) => (s.length > n ? s.slice(0, n - 1) + "…" : s);
  const tail = (s, n) => (s.length > n ? "…" + s.slice(1 - n) : s);
  // control characters and marks that turn text around are shown, not obeyed
  const safe = (s) => String(s).replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]/gu, (c) => "\\u" + c.codePointAt(0).toString(16).padStart(4, "0"));

  function element(tag, text, attributes) {
    const made = document.createElement(tag);
    if (text !== undefined && text !== null) made.textContent = safe(text);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name === "class") made.className = value;
      else made.setAttribute(name, value);
    }
    return made;
  }
  function fill(parent, ...children) {
    parent.replaceChildren(...children);
    return parent;
  }

  // ---------------------------------------------------------------- colours
  const PALETTE = ["#3b78c2", "#2e9e5b", "#8a5cc7", "#c2902b", "#1f9aa8", "#c2568f", "#7a8a2c", "#6b7785"];
  const HOT = "#e8590c";
  const isDark = () => dark.matches && !printing;
  const ink = () => (isDark() ? "#e6edf3" : "#1b1f24");
  const line = () => (isDark() ? "#30363d" : "#d0d7de");
  // a format's colour is its own in every report: of its family, or of its name
  const BLOCKS = { 4: "#1f9aa8", 8: "#c2902b", 16: "#8a5cc7", 32: "#c2568f" };
  const ORDER = "abcdefghijkl";
  function familyOf(format) {
    const name = format.replace(/^[a-z0-9_]+:/, "").replace(/^.*\].*$/, "strided");
    if (name === "strided") return { name, colour: "#6b7785" };
    if (ORDER.startsWith(name)) return { name: "row-major", colour: "#3b78c2" };
    if (name.length > 2 && name === "a" + ORDER.slice(2, name.length) + "b") return { name: "channels last", colour: "#2e9e5b" };
    const block = /^aB[c-l]*?(\d+)b$/.exec(name);
    if (block && BLOCKS[block[1]]) return { name: "blocks of " + block[1] + " channels", colour: BLOCKS[block[1]] };
    const sum = [...name].reduce((all, c) => (31 * all + c.codePointAt(0)) % 9973, 7);
    return { name, colour: "hsl(" + (sum % 360) + ",42%," + (42 + (sum % 3) * 8) + "%)" };
  }
  const formatColour = (format) => familyOf(format).colour;
  // bytes, and floats of two bytes; all others are f32
  const PRECISIONS = { u8: "#d6336c", s8: "#d6336c", bf16: "#7048e8", f16: "#7048e8" };
  const precisionColour = (dtype) => PRECISIONS[dtype] || "#6b7785";
  function precisions(rows, words) {
    const types = [...new Set(rows.map((row) => row.computes_in))];
    return [...new Set(types.map(precisionColour))].map((colour) => legendOf(colour, words + types.filter((one) => precisionColour(one) === colour).join(", ")));
  }
  const isMixed = (report) => new Set(report.precisions.map((one) => precisionColour(one.name))).size > 1;

  // ---------------------------------------------------------------- charts
  function draw(id, label, option) {
    let chart = charts.get(id);
    if (chart === undefined) {
      chart = echarts.init(byId(id), null, { renderer: "canvas" });
      charts.set(id, chart);
    }
    byId(id).setAttribute("aria-label", label);
    chart.setOption(
      {
        animation: false,
        textStyle: { color: ink(), fontFamily: "system-ui, sans-serif" },
        tooltip: { renderMode: "richText", confine: true, ...option.tooltip },
        ...option,
        ...(option.tooltip ? { tooltip: { renderMode: "richText", confine: true, ...option.tooltip } } : {}),
      },
      true,
    );
    return chart;
  }
  const axis = (more) => ({ axisLine: { lineStyle: { color: line() } }, axisLabel: { color: ink(), hideOverlap: true, alignMaxLabel: "right", ...(more.label || {}) }, splitLine: { lineStyle: { color: line() } }, nameTextStyle: { color: ink() }, ...more });
  // a label is measured by its characters: a chart reserves room for the longest one
  const room = (names) => 14 + 7 * Math.max(0, ...names.map((name) => name.length));
  const longest = () => (innerWidth < 600 ? 16 : 40);

  // ---------------------------------------------------------------- parts
  function head(report) {
    fill(byId("title")).textContent = safe(report.model + ": cost of reorders");
    const m = report.machine;
    byId("machine").textContent = safe([m.cpu, m.isa, m.threads + (m.threads === "1" ? " thread" : " threads"), "oneDNN " + m.onednn, "PyTorch " + m.torch].join(" · "));
    const buttons = POLICIES.map((one, index) => {
      const button = element("button", one.policy, { type: "button", "aria-pressed": String(index === current) });
      button.addEventListener("click", () => {
        show(index);
        byId("policies").children[index].focus();
      });
      return button;
    });
    fill(byId("policies"), ...buttons);
    byId("policies").hidden = POLICIES.length < 2;
  }

  function verdict(report) {
    fill(byId("failures"), ...DATA.failures.map((text) => element("p", text)));
    fill(byId("sentences"), ...report.verdict.concat(report.warnings).map((text) => element("li", micro(text))));
    const reordering = report.reorders.reduce((sum, row) => sum + row.seconds, 0);
    const verdicts = report.reorders.map((row) => row.counterfactual.verdict);
    const [wasted, unasked] = ["avoidable", "not solved"].map((name) => verdicts.filter((one) => one === name).length);
    const figures = [
      ["a run", milliseconds(report.seconds)],
      ["steps", report.steps.length],
      ["reorders", report.reorders.length],
      ["in reorders", milliseconds(reordering)],
      ["avoidable, " + report.costs, wasted + (unasked ? " of " + (verdicts.length - unasked) + " asked" : "")],
      ["packed once", report.packed.length],
      ["arena", bytes(report.memory.arena)],
      ["policy", report.policy + (isMixed(report) ? "" : ", " + report.precision)],
    ];
    if (isMixed(report)) report.precisions.forEach((one) => figures.push(["in " + (one.name || "no type"), one.steps + (one.steps === 1 ? " step, " : " steps, ") + milliseconds(one.seconds)]));
    if (report.certificate) figures.push(["above lower bound, " + report.costs, percent(report.certificate.gap)]);
    fill(byId("figures"), ...figures.map(([name, value]) => fill(element("div"), element("dt", name), element("dd", value))));
  }

  function compare() {
    byId("compare").hidden = POLICIES.length < 2;
    if (POLICIES.length < 2) return;
    const reordering = POLICIES.map((one) => one.reorders.reduce((sum, row) => sum + row.seconds, 0));
    const titles = ["policy", "a run", "reorders", "in reorders", "moved", "error"];
    const rows = POLICIES.map((one, i) => [
      one.policy,
      milliseconds(one.seconds),
      one.reorders.length,
      milliseconds(reordering[i]),
      bytes(one.reorders.reduce((sum, row) => sum + row.nbytes, 0)),
      one.error === null ? "" : one.error.toExponential(1),
    ]);
    table(byId("compared"), titles.map((title, i) => ({ title, number: i > 0 })), rows);
    byId("note").textContent = safe(DATA.note);
    const names = POLICIES.map((one) => clip(safe(one.policy), longest()));
    draw("compare-chart", "Time of a run under each policy, in reorders and in everything else", {
      grid: { left: room(names), right: 20, top: 36, bottom: 44 },
      legend: { textStyle: { color: ink() }, top: 0 },
      tooltip: { trigger: "axis", valueFormatter: (v) => v.toFixed(3) + " ms" },
      xAxis: axis({ type: "value", name: "ms", nameLocation: "middle", nameGap: 28 }),
      yAxis: axis({ type: "category", data: names, inverse: true }),
      series: [
        { name: "everything else", type: "bar", stack: "run", color: PALETTE[0], data: POLICIES.map((one, i) => Math.max(0, one.seconds - reordering[i]) * 1e3) },
        { name: "reorders", type: "bar", stack: "run", color: HOT, data: reordering.map((s) => s * 1e3) },
      ],
    });
  }

  function timeline(report) {
    let now = 0;
    const blocks = report.steps.flatMap((step, index) => {
      const row = isReorder(report, step.name) ? 0 : 1;
      const [from, to] = [now * 1e3, (now + step.seconds) * 1e3];
      now += step.seconds;
      const own = { value: [row, from, to, index], itemStyle: { color: row === 0 ? HOT : formatColour(step.formats.split(" -> ")[1]) } };
      return isMixed(report) ? [own, { value: [2, from, to, index], itemStyle: { color: precisionColour(step.computes_in) } }] : [own];
    });
    const names = isMixed(report) ? ["reorders", "steps", "precision"] : ["reorders", "steps"];
    fill(byId("precisions"), ...(isMixed(report) ? precisions(report.steps, "in ") : []));
    const chart = draw("timeline", "Timeline of a run: " + report.steps.length + " steps in " + milliseconds(now), {
      grid: { left: 74, right: 16, top: 8, bottom: 82 },
      xAxis: axis({ type: "value", name: "ms", nameLocation: "middle", nameGap: 26, min: 0, max: Number((now * 1e3).toPrecision(6)), label: { formatter: (v) => String(Number(v.toPrecision(3))) } }),
      yAxis: axis({ type: "category", data: names, inverse: true }),
      dataZoom: [{ type: "slider", filterMode: "weakFilter", bottom: 8, height: 22, showDetail: false, textStyle: { color: ink() } }, { type: "inside", filterMode: "weakFilter", zoomOnMouseWheel: "shift" }],
      tooltip: { formatter: (p) => stepText(report.steps[p.value[3]]) },
      series: [{
        type: "custom", encode: { x: [1, 2], y: 0 }, data: blocks, clip: true,
        renderItem: (params, api) => {
          const from = api.coord([api.value(1), api.value(0)]);
          const to = api.coord([api.value(2), api.value(0)]);
          const high = api.size([0, 1])[1] * 0.7;
          const wide = Math.max(1, to[0] - from[0] - 0.5);
          return { type: "rect", shape: { x: from[0], y: from[1] - high / 2, width: wide, height: high }, style: api.style() };
        },
      }],
    });
    chart.off("click");
    chart.on("click", (p) => isReorder(report, report.steps[p.value[3]].name) && choose(report.steps[p.value[3]].name));
  }
  const stepText = (step) => safe([step.name + "  " + milliseconds(step.seconds), step.op + ", " + step.impl + ", in " + step.computes_in, step.formats, clip(step.origin, 80)].filter(Boolean).join("\n"));
  const isReorder = (report, name) => report.reorders.some((row) => row.name === name);

  // ---------------------------------------------------------------- tables
  const cellClass = (column) => (column.number ? "number" : column.format ? "format" : column.key === "name" ? "name" : "");
  function table(parent, columns, rows) {
    const heads = columns.map((column) => element("th", column.title, { scope: "col", class: column.number ? "number" : "" }));
    const body = rows.map((row) => fill(element("tr"), ...row.map((cell, i) => element("td", cell, { class: cellClass(columns[i]) }))));
    fill(parent, fill(element("thead"), fill(element("tr"), ...heads)), fill(element("tbody"), ...body));
    hint(parent);
  }
  // a table or picture that is wider than its place says so
  const hint = (made) => (made.parentElement.dataset.wide = String(made.parentElement.scrollWidth > made.parentElement.clientWidth + 1));

  const COLUMNS = [
    { key: "name", title: "reorder" },
    { key: "seconds", title: "time", number: true, text: (row) => milliseconds(row.seconds) },
    { key: "share", title: "share", number: true, text: (row) => percent(row.share) },
    { key: "verdict", title: "verdict", value: (row) => row.counterfactual.verdict },
    { key: "difference", title: "without it", number: true, value: (row) => row.counterfactual.difference_seconds ?? Infinity, text: (row) => signed(row.counterfactual.difference_seconds) + inAnother(row.counterfactual) },
    { key: "formats", title: "formats", format: true, value: (row) => row.src + " → " + row.dst },
    { key: "edge", title: "edge", value: (row) => row.producer + " → " + row.readers.join(", ") },
    { key: "origin", title: "module" },
    { key: "cause", title: "cause" },
    { key: "kind", title: "class" },
    { key: "nbytes", title: "moved", number: true, text: (row) => bytes(row.nbytes) },
    { key: "padding_nbytes", title: "padding", number: true, text: (row) => bytes(row.padding_nbytes) },
    { key: "bytes_per_second", title: "GB/s", number: true, text: (row) => (row.bytes_per_second / 1e9).toFixed(1) },
  ];
  // otherwise the figure would look like the reorder's own
  const inAnother = (c) => (c.difference_seconds === null || c.difference_seconds === c.alone_seconds ? "" : " in another plan");
  const valueOf = (column, row) => (column.value ? column.value(row) : row[column.key]);
  const signed = (s) => (s === null ? "" : (s > 0 ? "+" : "−") + milliseconds(Math.abs(s)));

  function ledger(report) {
    const wanted = byId("search").value.toLowerCase();
    const column = COLUMNS.find((one) => one.key === order.key);
    const rows = report.reorders.filter((row) => !wanted || COLUMNS.some((one) => String(valueOf(one, row)).toLowerCase().includes(wanted)));
    const sign = order.down ? -1 : 1;
    rows.sort((a, b) => {
      const [x, y] = [valueOf(column, a), valueOf(column, b)];
      return sign * (x < y ? -1 : x > y ? 1 : 0);
    });
    byId("found").textContent = rows.length + " of " + report.reorders.length + " reorders of every run; " + report.packed.length + " constants were packed once";
    const heads = COLUMNS.map((one) => {
      const sorted = one.key === order.key;
      const th = element("th", null, { scope: "col", class: one.number ? "number" : "", "aria-sort": sorted ? (order.down ? "descending" : "ascending") : "none" });
      const title = one.key === "difference" ? one.title + ", " + report.costs : one.title;
      const button = element("button", title + (sorted ? (order.down ? " ▾" : " ▴") : ""), { type: "button" });
      button.addEventListener("click", () => {
        order = { key: one.key, down: sorted ? !order.down : Boolean(one.number) };
        ledger(report);
        byId("rows").querySelectorAll("th button")[COLUMNS.indexOf(one)].focus();
      });
      return fill(th, button);
    });
    fill(byId("rows"), fill(element("thead"), fill(element("tr"), ...heads)), fill(element("tbody"), ...rows.map(ledgerRow)));
    hint(byId("rows"));
  }
  function ledgerRow(row) {
    const tr = element("tr", null, { "aria-selected": String(chosen === row.name) });
    const cells = COLUMNS.map((column) => {
      const td = element("td", null, { class: cellClass(column) });
      if (column.key === "name") {
        const button = element("button", row.name, { type: "button" });
        button.addEventListener("click", () => choose(row.name, true));
        return fill(td, button);
      }
      if (column.key === "verdict") return fill(td, element("span", valueOf(column, row), { class: "tag " + valueOf(column, row).replace(/ .*/, "") }));
      td.textContent = safe(column.text ? column.text(row) : valueOf(column, row));
      return td;
    });
    return fill(tr, ...cells);
  }

  function detail(report) {
    const row = report.reorders.find((one) => one.name === chosen);
    if (!row) return fill(byId("detail"));
    const c = row.counterfactual;
    const differs = (s, error) => signed(s) + " a run, " + c.costs + " (± " + milliseconds(error) + ")";
    const others = c.why ? ", with " + c.why : "";
    const told = {
      forced: "No plan of these nodes does without it: " + c.why + ".",
      pays: "The cheapest plan without it: " + differs(c.extra_seconds, c.error_seconds) + others + ".",
      uncertain: "The cheapest plan without it: " + differs(c.extra_seconds, c.error_seconds) + others + ", a difference within the errors of the costs. fmtprop tune measures them.",
      avoidable: "The cheapest plan without it: " + differs(c.extra_seconds, c.error_seconds) + others + ". It may differ in other places too: gains of several reorders do not add up.",
    }[c.verdict] || "Not solved: " + c.why;
    const alone = c.alone_seconds === null ? "no such plan" : differs(c.alone_seconds, c.alone_error_seconds) + ", if only the writer and the readers of this tensor change";
    const boundary = new Set(report.nodes.filter((node) => ["input", "output"].includes(node.op)).map((node) => node.name));
    const place = (origin, names) => origin || (names.every((name) => boundary.has(name.split(".")[0])) ? "the caller" : "no module or line is known");
    const facts = [
      ["edge", row.producer + " → " + row.readers.join(", ")],
      ["modules", place(row.producer_origin, [row.producer]) + " → " + place(row.origin, row.readers)],
      ["formats", row.src + " → " + row.dst + " of " + row.dims.join("×")],
      ["why", micro(row.reason)],
      ["cause", row.cause + ": " + row.remedy],
      ["without it", told],
      ["changed here alone", alone],
      ["bytes", bytes(row.nbytes) + ", of these " + bytes(row.padding_nbytes) + " padding; elements alone " + bytes(row.logical_nbytes)],
      ["time", milliseconds(row.seconds) + ", " + (row.bytes_per_second / 1e9).toFixed(1) + " GB/s" + (row.bandwidth_share ? ", " + percent(row.bandwidth_share) + " of this machine's rate of copies in cache" : "")],
      ["kernel", row.impl + " (" + row.target + ")"],
    ];
    const list = element("dl");
    for (const [name, value] of facts) list.append(element("dt", name), element("dd", value));
    fill(byId("detail"), element("h3", row.name), list, ...pictures([["from ", row.src], ["to ", row.dst]]));
  }
  function pictures(formats) {
    return formats.filter(([, format]) => DATA.pictures.formats[format]).map(([side, format]) => {
      const image = element("img", null, { alt: "How a small tensor lies in memory in format " + safe(format), src: DATA.pictures.formats[format] });
      image.addEventListener("load", () => hint(image));
      return fill(element("figure"), image, element("figcaption", side + format));
    });
  }
  function edgeDetail(edge) {
    chosen = null;
    ledger(POLICIES[current]);
    const list = element("dl");
    for (const [name, value] of [["format", edge.format], ["bytes", bytes(edge.nbytes)], ["reorder", "none: its reader takes it as its producer writes it"]]) list.append(element("dt", name), element("dd", value));
    fill(byId("detail"), element("h3", edge.producer + " → " + edge.reader + "." + edge.operand), list, ...pictures([["", edge.format]]));
    byId("detail").scrollIntoView({ block: "nearest" });
  }

  // ---------------------------------------------------------------- graph
  function graph(report) {
    const known = new Map(report.reorders.map((row) => [row.name, row]));
    // the picture fills its place, with room for labels at its right edge: were both scaled differently, so were the
    // symbols; corners without a symbol keep the scale of a graph that is narrower
    const place = byId("graph-chart");
    const most = (key) => Math.max(1, ...report.nodes.map((node) => node[key]));
    const labelled = report.nodes.length < 60;
    const [left, right] = [30, labelled ? room(report.nodes.map((node) => clip(safe(node.name), 18))) : 30];
    const [wide, high] = [place.clientWidth - left - right, place.clientHeight - 40];
    const across = Math.min(260, wide / most("x"));
    const down = high / most("y");
    const indent = (wide - across * Math.max(0, ...report.nodes.map((node) => node.x))) / 2;
    const corners = [[0, 0], [wide, high]].map(([x, y], i) => ({ name: "\u0000" + i, x, y, symbol: "none", label: { show: false }, tooltip: { show: false } }));
    const size = Math.max(6, Math.min(14, 0.8 * across, 0.5 * down));
    const symbols = { input: "triangle", output: "triangle" };
    // a label ends before the next node of its row
    const rows = new Map();
    for (const node of report.nodes) rows.set(node.y, (rows.get(node.y) || []).concat(node.x));
    const space = (node) => {
      const next = Math.min(...rows.get(node.y).filter((x) => x > node.x));
      return next < Infinity ? (next - node.x) * across - size - 8 : wide + right - indent - node.x * across - size;
    };
    const labels = new Map(report.nodes.map((node) => {
      const most = Math.min(18, Math.floor(space(node) / 6.5));
      return [node.name, most < 4 ? "" : clip(safe(node.name), most)];
    }));
    const nodes = report.nodes.map((node) => ({
      name: node.name, x: indent + node.x * across, y: node.y * down, value: node,
      symbol: known.has(node.name) ? "diamond" : symbols[node.op] || "roundRect",
      symbolSize: size * (known.has(node.name) ? 1.4 : node.target === "view" ? 0.6 : 1),
      itemStyle: { color: known.has(node.name) ? HOT : formatColour(node.format), borderColor: node.name === chosen ? ink() : PRECISIONS[node.computes_in] || "transparent", borderWidth: node.name === chosen ? 4 : PRECISIONS[node.computes_in] && node.target !== "view" ? 2.5 : 0 },
    }));
    const links = report.edges.map((edge) => {
      const hot = known.has(edge.producer) || known.has(edge.reader);
      return { source: edge.producer, target: edge.reader, value: edge, lineStyle: { color: hot ? HOT : formatColour(edge.format), width: hot ? 3 : 1.2, opacity: hot ? 1 : 0.7 } };
    });
    const many = nodes.length > 400;
    const chart = draw("graph-chart", "Graph of " + nodes.length + " nodes and " + links.length + " edges, " + known.size + " reorders", {
      tooltip: { formatter: (p) => graphText(p.dataType === "edge" ? p.value || p.data.value : p.data.value, p.dataType) },
      series: [{
        type: "graph", layout: "none", roam: true, draggable: false, data: nodes.concat(corners), links, left, right, top: 20, bottom: 20,
        edgeSymbol: many ? ["none", "none"] : ["none", "arrow"], edgeSymbolSize: 5, scaleLimit: { min: 0.3, max: 60 }, zoom: 1,
        label: { show: labelled, position: "right", color: ink(), fontSize: 11, formatter: (p) => labels.get(p.name) || "" },
        labelLayout: { hideOverlap: true },
        emphasis: { disabled: many }, silent: false,
      }],
    });
    chart.off("click");
    chart.on("click", (p) => {
      const names = p.dataType === "edge" ? [p.data.source, p.data.target] : [p.data.name];
      const name = names.find((one) => known.has(one));
      if (name) choose(name);
      else if (p.dataType === "edge") edgeDetail(p.data.value);
    });
    byId("in").onclick = () => zoom(chart, 1.6);
    byId("out").onclick = () => zoom(chart, 1 / 1.6);
    byId("fit").onclick = () => graph(report);
    const shown = new Map(report.nodes.map((node) => familyOf(node.format)).map((one) => [one.name, one.colour]));
    fill(byId("legend"), legendOf(HOT, "reorder"), ...precisions(report.nodes.filter((node) => PRECISIONS[node.computes_in]), "edges: nodes in "), ...[...shown].slice(0, 12).map(([name, colour]) => legendOf(colour, name)));
  }
  function zoom(chart, factor) {
    const series = chart.getOption().series[0];
    chart.setOption({ series: [{ zoom: (series.zoom || 1) * factor }] });
  }
  function legendOf(colour, name) {
    const space = "http://www.w3.org/2000/svg";
    const picture = document.createElementNS(space, "svg");
    const box = document.createElementNS(space, "rect");
    for (const [key, value] of Object.entries({ width: 12, height: 12, rx: 2, fill: colour })) box.setAttribute(key, value);
    picture.setAttribute("aria-hidden", "true");
    picture.append(box);
    const span = element("span");
    span.append(picture, document.createTextNode(safe(name)));
    return span;
  }
  function graphText(value, type) {
    if (!value) return "";
    if (type === "edge") return safe(value.producer + " → " + value.reader + "." + value.operand + "\n" + value.format + ", " + bytes(value.nbytes));
    return safe([value.name, value.op + (value.impl && value.target !== "view" ? ", " + value.impl : ""), value.format, clip(value.origin, 80)].filter(Boolean).join("\n"));
  }

  // ---------------------------------------------------------------- modules, memory, steps
  function modules(report) {
    const top = report.modules.slice(0, 20);
    // modules of a network differ in the last parts of their paths
    const names = top.map((one) => tail(safe(one.name || "(no module)"), longest()));
    byId("module-chart").style.height = 90 + 26 * top.length + "px";
    const chart = draw("module-chart", "Time of each module, in reorders and in everything else; bytes that reorders move", {
      grid: { left: room(names), right: 20, top: 36, bottom: 44 },
      legend: { textStyle: { color: ink() }, top: 0 },
      tooltip: { trigger: "axis", formatter: (all) => safe(top[all[0].dataIndex].name + "\n" + all.map((one) => one.seriesName + " " + one.value.toFixed(3) + " ms").join("\n") + "\nreorders move " + bytes(top[all[0].dataIndex].nbytes)) },
      xAxis: axis({ type: "value", name: "ms", nameLocation: "middle", nameGap: 28 }),
      yAxis: axis({ type: "category", data: names, inverse: true }),
      series: [
        { name: "everything else", type: "bar", stack: "time", color: PALETTE[0], data: top.map((one) => (one.seconds - one.reorder_seconds) * 1e3) },
        { name: "reorders", type: "bar", stack: "time", color: HOT, data: top.map((one) => one.reorder_seconds * 1e3) },
      ],
    });
    chart.resize();
  }

  function memory(report) {
    byId("memory").hidden = !report.buffers.length;
    if (!report.buffers.length) return;
    const outside = report.memory.peak > report.memory.arena ? ", with tensors that PyTorch allocates outside of it," : "";
    byId("memory-text").textContent = "The arena has " + bytes(report.memory.arena) + "; at most " + bytes(report.memory.peak) + outside + " are alive at one step. Constants take " + bytes(report.memory.constants) + ".";
    draw("memory-chart", "Arena: the buffers over the steps in which they hold data", {
      grid: { left: 64, right: 16, top: 32, bottom: 44 },
      xAxis: axis({ type: "value", name: "step", nameLocation: "middle", nameGap: 26, min: 0, minInterval: 1, max: report.steps.length }),
      yAxis: axis({ type: "value", name: "MiB", min: 0, label: { formatter: (v) => String(Number(v.toPrecision(3))) } }),
      tooltip: { formatter: (p) => { const b = report.buffers[p.value[4]]; return bytes(b.nbytes) + " at " + bytes(b.offset_nbytes) + "\nsteps " + b.first_step + " to " + b.last_step; } },
      series: [{
        type: "custom", encode: { x: [0, 1], y: [2, 3] }, clip: true,
        data: report.buffers.map((b, i) => ({ value: [b.first_step, b.last_step + 1, b.offset_nbytes / 1048576, (b.offset_nbytes + b.nbytes) / 1048576, i], itemStyle: { color: PALETTE[i % PALETTE.length], opacity: 0.8 } })),
        renderItem: (params, api) => {
          const from = api.coord([api.value(0), api.value(3)]);
          const to = api.coord([api.value(1), api.value(2)]);
          return { type: "rect", shape: { x: from[0], y: from[1], width: Math.max(1, to[0] - from[0] - 0.5), height: Math.max(1, to[1] - from[1]) }, style: api.style() };
        },
      }],
    });
  }

  const IN_FLOATS = "stays in floats: ";
  function slowest(report) {
    const rows = [...report.steps].sort((a, b) => b.seconds - a.seconds).slice(0, 30);
    byId("h-steps").textContent = rows.length < report.steps.length ? "Slowest " + rows.length + " of " + report.steps.length + " steps" : "All steps, the slowest first";
    const why = report.certificate ? "why, costs " + report.costs : "why";  // reasons of policy optimal have costs
    const columns = ["step", "time", "in", "op", "implementation", "formats", "module", why].map((title, i) => ({ title, number: i === 1, format: i === 4 || i === 5 }));
    table(byId("slowest"), columns, rows.map((step) => [step.name, milliseconds(step.seconds), step.computes_in, step.op, step.impl, step.formats, step.origin, micro(step.reason)]));
    byId("slowest").querySelectorAll("tbody td:nth-child(3)").forEach((cell) => PRECISIONS[cell.textContent] && cell.prepend(legendOf(precisionColour(cell.textContent), "").firstChild, " "));
    const floats = report.steps.filter((step) => step.reason.includes(IN_FLOATS));
    byId("floats").hidden = !floats.length;
    const told = ["step", "time", "in", "op", "module", why].map((title, i) => ({ title, number: i === 1 }));
    table(byId("in-floats"), told, floats.map((step) => [step.name, milliseconds(step.seconds), step.computes_in, step.op, step.origin, micro(step.reason.split(IN_FLOATS)[1])]));
  }

  // ---------------------------------------------------------------- actions
  function choose(name, focus) {
    chosen = name;
    ledger(POLICIES[current]);
    detail(POLICIES[current]);
    if (!waitingFor.has("graph")) graph(POLICIES[current]);
    if (focus) byId("detail").focus({ preventScroll: true });
    byId("detail").scrollIntoView({ block: "nearest" });
  }
  function show(index) {
    current = index;
    chosen = null;
    const report = POLICIES[index];
    for (const part of [head, verdict, ledger, detail, slowest]) part(report);
    // charts come one after the other: a large graph takes a moment, and the text is there already
    delete document.documentElement.dataset.drawn;
    waitingFor.clear();
    for (const [id, part] of CHARTS) waitingFor.set(id, () => part(report));
    setTimeout(arrive, 0);
    byId("compare").hidden = POLICIES.length < 2;
    byId("memory").hidden = !report.buffers.length;
  }
  const CHARTS = [["compare", compare], ["time", timeline], ["graph", graph], ["modules", modules], ["memory", memory]];
  const waitingFor = new Map();
  function arrive() {
    const [id, part] = waitingFor.entries().next().value || [];
    if (!part) {
      // two frames later, the last chart is on the screen
      requestAnimationFrame(() => requestAnimationFrame(() => (document.documentElement.dataset.drawn = String(Math.round(performance.now())))));
      return;
    }
    waitingFor.delete(id);
    part();
    document.documentElement.dataset[id] = String(Math.round(performance.now()));
    setTimeout(arrive, 0);
  }
  let waiting = 0;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      charts.forEach((chart) => chart.resize());
      graph(POLICIES[current]);
      document.querySelectorAll(".scroll table").forEach(hint);
    }, 100);
  });
  function print(begins) {
    while (waitingFor.size) arrive();
    printing = begins;
    document.documentElement.classList.toggle("printing", begins);
    charts.forEach((chart) => chart.resize());
    for (const [, part] of CHARTS) part(POLICIES[current]);
    charts.forEach((chart) => chart.getZr().flush()); // a printer does not wait for the next frame
  }
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  dark.addEventListener("change", () => show(current));
  byId("search").addEventListener("input", () => ledger(POLICIES[current]));
  show(current);
  // a reorder's name behind the address's # leads to it
  const wanted = decodeURIComponent(location.hash.slice(1));
  if (isReorder(POLICIES[current], wanted)) choose(wanted);
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
})();
