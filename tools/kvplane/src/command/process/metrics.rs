//! `--metrics-port`: counters over HTTP, for whoever scrapes.

use kvplane::MetricsServer;

use crate::command::Failure;

/// Serves what `render` says on this port of loopback, where one was given.
pub(crate) fn serve(
    port: Option<u16>,
    render: impl Fn() -> Option<String> + Send + Sync + 'static,
) -> Result<Option<MetricsServer>, Failure> {
    Ok(port.map(|port| MetricsServer::start(port, render)).transpose()?)
}

/// Where that is, for people.
pub(crate) fn say(server: &MetricsServer, what: &str) -> String {
    format!("{what} on http://{}/metrics", server.address())
}
