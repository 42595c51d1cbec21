"""torch as a backend of Keras: the engine, the loop, and the steps that go into a model."""
