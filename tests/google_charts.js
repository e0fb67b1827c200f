/* Stands in for https://www.gstatic.com/charts/loader.js in tests/test_tensorboard.py.

   torch-tb-profiler hands its figures to Google Charts, which no package ships: Google's terms have every page load it
   from Google, and tests run without a network. So here is, in our own words, the part of its interface that the
   plugin's frontend calls. A chart is drawn as a table of the data that the frontend handed over, for a test to read:
   frontend, server and traces are the real ones, and only the drawing is not. */
"use strict";

(() => {
  const shown = cell => {
    const value = cell !== null && typeof cell === "object" ? cell.f ?? cell.v : cell;
    return value === null || value === undefined ? "" : String(value);
  };

  class DataTable {
    columns = [];
    rows = [];

    addColumn(column) {
      this.columns.push(column);
    }

    addRow(row) {
      this.rows.push(row);
    }

    addRows(rows) {
      this.rows.push(...rows);
    }

    setProperty() {} // of a cell: colours, and stacks in a tooltip
  }

  const arrayToDataTable = ([header, ...rows]) => {
    const table = new DataTable();
    header.forEach(label => table.addColumn({ label }));
    table.addRows(rows);
    return table;
  };

  class Chart {
    constructor(container) {
      this.container = container;
    }

    draw(data, options = {}) {
      // A column with a role is no data but, say, the tooltip of the one before it.
      const places = [...data.columns.keys()].filter(place => !data.columns[place].role);
      const row = (kind, texts) => {
        const made = document.createElement("tr");
        made.append(...texts.map(text => Object.assign(document.createElement(kind), { textContent: text })));
        return made;
      };
      const table = document.createElement("table");
      table.border = 1;
      table.dataset.chart = this.constructor.name;
      table.createCaption().textContent = [options.title, options.vAxis?.title].filter(Boolean).join(", in ");
      table.createTHead().append(row("th", places.map(place => data.columns[place].label ?? data.columns[place].id ?? "")));
      table.createTBody().append(...data.rows.map(cells => row("td", places.map(place => shown(cells[place])))));
      const frame = Object.assign(document.createElement("div"), { style: "max-height: 100%; overflow: auto; font-size: 13px" });
      if (options.height) frame.style.maxHeight = typeof options.height === "number" ? `${options.height}px` : options.height;
      frame.append(table);
      this.container.replaceChildren(frame);
    }

    clearChart() {
      this.container.replaceChildren();
    }

    getSelection() {
      return [];
    }

    setSelection() {}
  }

  const charts = {};
  for (const name of ["ColumnChart", "ComboChart", "LineChart", "PieChart", "SteppedAreaChart", "Table", "Timeline"])
    charts[name] = { [name]: class extends Chart {} }[name];

  window.google = {
    charts: { load: async () => {} },
    visualization: { ...charts, DataTable, arrayToDataTable, events: { addListener() {} } }, // nobody points at a table
  };
})();
