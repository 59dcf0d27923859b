(function () {
  "use strict";
  var root = document.documentElement;

  function all(selector, within) {
    return Array.prototype.slice.call((within || document).querySelectorAll(selector));
  }

  function startTheme() {
    var button = document.getElementById("theme");
    var system = window.matchMedia("(prefers-color-scheme: dark)");
    function current() {
      return root.dataset.theme || (system.matches ? "dark" : "light");
    }
    function label() {
      button.textContent = current() === "dark" ? "Light theme" : "Dark theme";
    }
    button.addEventListener("click", function () {
      root.dataset.theme = current() === "dark" ? "light" : "dark";
      try {
        window.localStorage.setItem("loka-theme", root.dataset.theme);
      } catch (error) {
        /* No storage: the choice holds until the page is left. */
      }
      label();
    });
    system.addEventListener("change", label);
    label();
    button.hidden = false;
  }

  function keyOf(cell, numeric) {
    var text = cell.dataset.v === undefined ? cell.textContent.trim() : cell.dataset.v;
    if (!numeric) return text;
    var number = text === "" ? NaN : Number(text === "inf" ? Infinity : text === "-inf" ? -Infinity : text);
    return number;
  }

  function startSorting(table) {
    var body = table.tBodies[0];
    var heads = all("thead th", table);
    heads.forEach(function (head, column) {
      if (!head.dataset.sort) return;
      var numeric = head.dataset.sort === "number";
      var collator = new Intl.Collator(undefined, { numeric: true });
      var button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      while (head.firstChild) button.appendChild(head.firstChild);
      head.appendChild(button);
      button.addEventListener("click", function () {
        var first = head.dataset.first || "ascending";
        var second = first === "ascending" ? "descending" : "ascending";
        var order = head.getAttribute("aria-sort") === first ? second : first;
        var sign = order === "ascending" ? 1 : -1;
        var rows = Array.prototype.map.call(body.rows, function (row) {
          return { row: row, key: keyOf(row.cells[column], numeric) };
        });
        rows.sort(function (a, b) {
          if (!numeric) return sign * collator.compare(a.key, b.key);
          var missing = Number(isNaN(a.key)) - Number(isNaN(b.key));
          if (missing || isNaN(a.key)) return missing;
          return a.key === b.key ? 0 : a.key < b.key ? -sign : sign;
        });
        heads.forEach(function (other) {
          other.removeAttribute("aria-sort");
        });
        head.setAttribute("aria-sort", order);
        var sorted = document.createDocumentFragment();
        rows.forEach(function (entry) {
          sorted.appendChild(entry.row);
        });
        body.appendChild(sorted);
      });
    });
  }

  function startFilter(toolbar) {
    var table = document.getElementById(toolbar.dataset.for);
    var rows = Array.prototype.slice.call(table.tBodies[0].rows);
    var texts = null;
    var controls = all("[data-filter]", toolbar);
    var shown = toolbar.querySelector("output");
    function apply() {
      var count = 0;
      if (texts === null) {
        texts = rows.map(function (row) {
          return row.textContent.toLowerCase().replace(/\s+/g, " ");
        });
      }
      rows.forEach(function (row, index) {
        var keep = controls.every(function (control) {
          var wanted = control.value;
          if (wanted === "") return true;
          if (control.dataset.filter === "text") {
            return texts[index].indexOf(wanted.toLowerCase().replace(/\s+/g, " ")) !== -1;
          }
          return row.dataset[control.dataset.filter] === wanted;
        });
        row.hidden = !keep;
        if (keep) count += 1;
      });
      shown.textContent = count + " of " + rows.length + " rows";
    }
    controls.forEach(function (control) {
      control.addEventListener(control.dataset.filter === "text" ? "input" : "change", apply);
    });
    toolbar.addEventListener("reset", function () {
      window.setTimeout(apply, 0);
    });
    toolbar.addEventListener("submit", function (event) {
      event.preventDefault();
    });
    toolbar.hidden = false;
    apply();
  }

  /* A link to a row that a filter hides brings it back. */
  function reveal() {
    var target = window.location.hash && document.getElementById(window.location.hash.slice(1));
    if (!target || !target.hidden) return;
    var table = target.closest("table");
    all("form.toolbar").forEach(function (toolbar) {
      if (table && toolbar.dataset.for === table.id) toolbar.reset();
    });
    window.setTimeout(function () {
      target.scrollIntoView({ block: "center" });
    }, 0);
  }

  function startPrinting() {
    var opened = [];
    window.addEventListener("beforeprint", function () {
      opened = all("details:not([open])");
      opened.forEach(function (details) {
        details.open = true;
      });
    });
    window.addEventListener("afterprint", function () {
      opened.forEach(function (details) {
        details.open = false;
      });
    });
  }

  startTheme();
  all("table.sortable").forEach(startSorting);
  all("form.toolbar").forEach(startFilter);
  window.addEventListener("hashchange", reveal);
  startPrinting();
})();
