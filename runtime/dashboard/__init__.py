"""``penstock dashboard``: one local page that shows a run from its folder, while it goes on and after."""
