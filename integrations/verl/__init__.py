"""verl 0.9: a whole rollout, a client for its agent loops, or a router for its own servers.

What verl loads by name: `manager.ScheduledAgentLoopManager`, `manager.GatewayAgentLoopManager` and
`router.Router`. Modules that import verl, Ray or torch are those three, `gateway_client` and
`coordinator`; the others stand without them.
"""
