"""The daemon process: settings, ordered start and stop, reload, systemd, tracing.

Imports `server` and below; neither the client nor an integration nor torch. Begin with `serve`, then `daemon`;
`settings` has every option once.
"""
