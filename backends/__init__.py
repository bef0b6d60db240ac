"""What each engine provides, behind one interface. Imported as `keras_flow.backends`."""
