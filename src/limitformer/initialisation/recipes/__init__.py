"""Published initialisations as functions, and the law of a model's own code compared with them.

* `recipe` has what a recipe is and the table of names, `published` the recipes with their sources; `law` has the weight
  that they take, and the law that they return;
* `roles` says what each weight of a model is, and `comparison` compares the two laws of each weight.

Names are imported on first use: the recipes need no torch.
"""

import sys as _sys
from typing import TYPE_CHECKING

from limitformer.base.extras import LazyPackage as _LazyPackage

if TYPE_CHECKING:
    from limitformer.initialisation.recipes.comparison import RecipeComparison as RecipeComparison
    from limitformer.initialisation.recipes.comparison import compare_with_recipe as compare_with_recipe
    from limitformer.initialisation.recipes.law import SIZES as SIZES
    from limitformer.initialisation.recipes.law import Weight as Weight
    from limitformer.initialisation.recipes.law import known_as as known_as
    from limitformer.initialisation.recipes.recipe import Recipe as Recipe
    from limitformer.initialisation.recipes.recipe import recipe_of as recipe_of
    from limitformer.initialisation.recipes.recipe import recipes as recipes

_HOMES = {
    **dict.fromkeys(("RecipeComparison", "compare_with_recipe"), "comparison"),
    **dict.fromkeys(("Recipe", "recipe_of", "recipes"), "recipe"),
    **dict.fromkeys(("SIZES", "Weight", "known_as"), "law"),
}
_sys.modules[__name__].__class__ = _LazyPackage
