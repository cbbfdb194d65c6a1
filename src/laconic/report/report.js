"use strict";
(async () => {
  const root = document.documentElement;
  const { lanes, figures } = JSON.parse(document.getElementById("data").textContent);
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
  const shown = new Set(Array(lanes).keys());
  const ROW = 46; // pixels of a bar and its name

  // plotly takes <b>, <a> and entities in a text for markup
  const plain = (text) =>
    text.replace(/[&<>]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[sign]);

  // names of colours become what the page's variables hold now: light, dark, or paper
  const paint = (value, key, variables) => {
    if (Array.isArray(value)) return value.map((one) => paint(one, "", variables));
    if (value && typeof value === "object")
      return Object.fromEntries(
        Object.entries(value).map(([name, one]) => [name, paint(one, name, variables)]),
      );
    return key.endsWith("color") ? variables.getPropertyValue("--" + value).trim() : value;
  };

  // a bar's name, cut to the width there is, and what it comes to
  const label = (name, after, width, font) => {
    const pen = (label.pen ??= document.createElement("canvas").getContext("2d"));
    pen.font = font;
    const room = width - pen.measureText("  " + after).width - 30;
    let cut = name;
    while (cut.length > 4 && pen.measureText(cut).width > room) cut = cut.slice(0, -2) + "…";
    return `<b>${plain(cut)}</b>  ${plain(after)}`;
  };

  // 1, 2, 5, 10 on a logarithmic axis where they have room; powers of ten, or as plotly likes
  const ticks = (decades, pixels) =>
    decades < 0.8 ? null : pixels / (3 * decades) < 38 ? 1 : "D2";
  const decadesOf = (values) => {
    const seen = values.filter((value) => value > 0);
    return seen.length ? Math.log10(Math.max(...seen) / Math.min(...seen)) : 0;
  };
  const spread = (axis, values, pixels, before) => {
    if (axis.type !== "log" || axis.tickvals || axis.dtick) return;
    const zoomed = before?.type === "log" && before.autorange === false;
    const decades = zoomed ? before.range[1] - before.range[0] : decadesOf(values);
    axis.dtick = ticks(decades, pixels);
  };

  const draw = (id, width) => {
    const { traces, layout, bars, linear } = figures[id];
    const plot = document.querySelector(`#${id} .plot`);
    const variables = getComputedStyle(root);
    const family = getComputedStyle(document.body).fontFamily;
    const seen = structuredClone(traces)
      .filter((trace) => !trace.lanes.length || trace.lanes.some((lane) => shown.has(lane)))
      .map((trace) => ({ ...trace, name: plain(trace.name ?? "") }));
    const painted = paint(structuredClone(layout), "", variables);
    painted.font.family = painted.hoverlabel.font.family = family;
    painted.uirevision = String(linear); // what was zoomed into stays
    painted.width = width ?? plot.clientWidth;
    if (linear) painted.xaxis = { ...painted.xaxis, type: "linear", tickformat: "" };
    // the start, at nought, is infinitely far to the left
    else if (painted.xaxis.type === "log")
      for (const trace of seen) {
        const there = (_, at) => trace.x[at] > 0;
        for (const part of ["text", "y", "x"]) trace[part] = trace[part]?.filter(there);
      }
    // a finger that drags wants the page to scroll
    painted.dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";
    if (bars) {
      const order = [...new Set(seen.map((trace) => trace.lanes[0]))];
      for (const trace of seen) {
        const at = order.indexOf(trace.lanes[0]);
        trace.y = [trace.type === "bar" ? at : at - 0.42];
        if (trace.after)
          trace.text = [label(trace.text[0], trace.after, painted.width, `700 13px ${family}`)];
      }
      painted.yaxis.range = [order.length - 0.6, -0.75];
      painted.height = ROW * Math.max(1, order.length) + 70;
      plot.style.height = `${painted.height}px`;
    } else {
      for (const trace of seen) trace.text = trace.text?.map(plain);
      painted.height = plot.clientHeight;
    }
    const { xaxis, yaxis } = plot.layout ?? {};
    spread(painted.xaxis, seen.flatMap((trace) => trace.x), painted.width, xaxis);
    spread(painted.yaxis, seen.flatMap((trace) => trace.y), painted.height, yaxis);
    const still = { displayModeBar: false, scrollZoom: false, staticPlot: false };
    return Plotly.react(plot, paint(seen, "", variables), painted, still);
  };
  const drawAll = (width) => {
    // a jump to a figure ends below the legend that stays on top
    root.style.scrollPaddingTop = `${document.querySelector(".legend").offsetHeight + 12}px`;
    return Promise.all(Object.keys(figures).map((id) => draw(id, width)));
  };

  // ticks for what was zoomed into
  const follow = (plot) =>
    plot.on("plotly_relayout", (change) => {
      const changed = {};
      for (const axis of ["xaxis", "yaxis"]) {
        const { type, range, tickvals } = plot.layout[axis];
        const pixels = axis === "xaxis" ? plot.clientWidth : plot.clientHeight;
        const moved = `${axis}.range[0]` in change || `${axis}.autorange` in change;
        if (moved && type === "log" && !tickvals)
          changed[`${axis}.dtick`] = ticks(range[1] - range[0], pixels);
      }
      if (Object.keys(changed).length) Plotly.relayout(plot, changed);
    });

  const unpack = async (packed) => {
    const bytes = Uint8Array.from(atob(packed), (sign) => sign.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  };

  const legend = all(".legend [data-lane]");
  const everything = document.querySelector(".legend .all");
  const show = (button, on) => {
    const lane = Number(button.dataset.lane);
    button.setAttribute("aria-pressed", String(on));
    if (on) shown.add(lane);
    else shown.delete(lane);
    everything.hidden = shown.size === lanes;
  };

  try {
    const script = document.createElement("script");
    script.textContent = await unpack(document.getElementById("plotly").textContent);
    document.head.append(script);
    await drawAll();
    all(".plot").forEach(follow);
  } catch (error) {
    document.getElementById("failed").hidden = false;
    for (const one of all(".plot, .tools, .key, .legend")) one.hidden = true;
    for (const one of all("details")) one.open = true;
    root.dataset.state = "failed";
    throw error;
  }

  for (const button of legend)
    button.addEventListener("click", () => {
      show(button, button.getAttribute("aria-pressed") === "false");
      drawAll();
    });
  everything.addEventListener("click", () => {
    for (const button of legend) show(button, true);
    legend[0].focus();
    drawAll();
  });
  for (const figure of all(".figure")) {
    const scale = figure.querySelector(".scale");
    scale?.addEventListener("click", () => {
      const linear = scale.getAttribute("aria-pressed") === "true";
      scale.setAttribute("aria-pressed", String(!linear));
      figures[figure.id].linear = linear;
      draw(figure.id);
    });
    figure.querySelector(".save")?.addEventListener("click", () => {
      const plot = figure.querySelector(".plot");
      const { width, height } = plot.getBoundingClientRect();
      Plotly.downloadImage(plot, { format: "svg", filename: `race-${figure.id}`, width, height });
    });
  }

  let width = innerWidth;
  addEventListener("resize", () => {
    // a phone's address bar changes the height alone
    if (innerWidth !== width) drawAll();
    width = innerWidth;
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll());
  addEventListener("beforeprint", () => {
    root.dataset.theme = "light";
    drawAll(680);
  });
  addEventListener("afterprint", () => {
    delete root.dataset.theme;
    drawAll();
  });
  root.dataset.state = "drawn";
})();
