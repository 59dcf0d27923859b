(function () {
  "use strict";
  var root = document.documentElement;
  root.classList.add("js");
  try {
    var kept = window.localStorage.getItem("loka-theme");
    if (kept === "light" || kept === "dark") root.dataset.theme = kept;
  } catch (error) {
    /* No storage: the system's theme is used, and the choice is not remembered. */
  }
})();
