"use strict";
// The menu of a page of limitformer steps: it shows the plots of the chosen learning rate.

const select = document.getElementById("rate");
const show = () => {
  for (const each of document.querySelectorAll("[data-choice]")) each.hidden = each.dataset.choice !== select.value;
};
select.addEventListener("input", show);
show();
