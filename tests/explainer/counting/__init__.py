"""What each engine really sends, counted by the engine's own means; shares nothing with `keras_flow.explainer`."""
