//! `--metrics-port`: counters over HTTP for Prometheus.

use kvplane::MetricsServer;

use crate::command::Failure;

/// Serves the text of `render` on this loopback port, if one is given.
pub(crate) fn serve(
    port: Option<u16>,
    render: impl Fn() -> Option<String> + Send + Sync + 'static,
) -> Result<Option<MetricsServer>, Failure> {
    Ok(port.map(|port| MetricsServer::start(port, render)).transpose()?)
}

/// Formats the URL of the metrics for the operator.
pub(crate) fn say(server: &MetricsServer, what: &str) -> String {
    format!("{what} on http://{}/metrics", server.address())
}
