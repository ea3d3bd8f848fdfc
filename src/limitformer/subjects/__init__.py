"""The model that a command is asked about, and its inputs: `resolve(what) -> Subject`.

* `subject` resolves a name, folder, JSON, configuration (`configurations`, `classes`), function (`user_code`) or
  module; `shapes` are the public names, `folder` and `checkpoints` load weights, `size` builds on the meta device;
* `inputs` and `choices` are the arguments of `forward`, `losses` the loss.

"""
