"""One folder per engine, all behind one interface. Imported as `keras_flow.backends`."""
