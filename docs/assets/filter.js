// A search field above each long table: rows that do not contain the words are hidden.
document$.subscribe(() => {
  for (const table of document.querySelectorAll("article table")) {
    const rows = [...table.querySelectorAll("tbody tr")];
    if (rows.length < 12) continue;
    const input = document.createElement("input");
    input.type = "search";
    input.placeholder = "Filter this table";
    input.className = "table-filter";
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/);
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
    (table.closest(".md-typeset__scrollwrap") ?? table).before(input);
  }
});
