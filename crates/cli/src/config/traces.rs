//! Where the spans of a server are sent, as the file, the environment and the flags say. It knows the names of the
//! settings and what their values may be; what is sent is decided elsewhere. What it says about a mistake names the
//! setting and its place, and no header.

use std::path::{Path, PathBuf};

use hyper::Uri;
use hyper::header::{HeaderName, HeaderValue};
use serde::Deserialize;
use serde_json::json;

use crate::client::connect::Place;
use crate::config::Printed;
use crate::config::options::ServerOptions;
use crate::config::settings::{Given, Origin, Setting};
use crate::output::{Exit, Problem};

/// The path to which spans are sent, by the protocol.
const PATH: &str = "/v1/traces";
/// The name of the service, if it is not set.
const SERVICE: &str = "latch";

/// `[traces]` in the file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TracesTable {
    endpoint: Option<String>,
    service: Option<String>,
    ratio: Option<f64>,
    pub(crate) headers_file: Option<PathBuf>,
}

/// The settings of traces that are in force.
pub(crate) struct TraceSettings {
    /// Empty if no spans are sent.
    endpoint: Setting<String>,
    service: Setting<String>,
    ratio: Setting<f64>,
    headers_file: Setting<Option<PathBuf>>,
}

/// Where spans are sent, and which.
pub(crate) struct Collector {
    pub(crate) place: Place,
    /// The path of the address.
    pub(crate) target: String,
    pub(crate) service: String,
    /// From 0 to 1.
    pub(crate) ratio: f64,
    /// They may hold secrets, and are never printed.
    pub(crate) headers: Vec<(HeaderName, HeaderValue)>,
}

impl TraceSettings {
    pub(crate) fn read(
        file: TracesTable,
        options: &ServerOptions,
        given: Given<'_>,
        from_file: impl Fn() -> Origin,
    ) -> TraceSettings {
        let TracesTable { endpoint, service, ratio, headers_file } = file;
        let endpoint = Setting::new(String::new()).or(endpoint, &from_file);
        // The variable for all signals holds a base, that of traces the whole address.
        let base = |base: String| format!("{}{PATH}", base.trim_end_matches('/'));
        let endpoint = of_environment(endpoint, "OTEL_EXPORTER_OTLP_ENDPOINT", base);
        let endpoint = of_environment(endpoint, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", |whole| whole);
        let service = Setting::new(SERVICE.to_string()).or(service, &from_file);
        let service = of_environment(service, "OTEL_SERVICE_NAME", |name| name);
        let headers_file = Setting::new(None).or(headers_file.map(Some), &from_file);
        TraceSettings {
            endpoint: given.over(endpoint, "traces_endpoint", options.traces_endpoint.clone()),
            service: given.over(service, "traces_service", options.traces_service.clone()),
            ratio: given.over(Setting::new(1.0).or(ratio, &from_file), "traces_ratio", options.traces_ratio),
            headers_file: given.over(headers_file, "traces_headers_file", Some(options.traces_headers_file.clone())),
        }
    }

    /// Checks everything. `None` if no spans are sent.
    pub(crate) fn collector(&self) -> Result<Option<Collector>, Problem> {
        if !(0.0..=1.0).contains(&self.ratio.value) {
            return Err(wrong("ratio", &self.ratio.origin, "it is a number from 0 to 1"));
        }
        if self.service.value.trim().is_empty() {
            return Err(wrong("service", &self.service.origin, "it is empty"));
        }
        let Some(address) = self.address()? else { return Ok(None) };
        let bad = |why: &str| wrong("endpoint", &self.endpoint.origin, why);
        let (place, target) = Place::read(&address, None).map_err(|_| bad("it is not an address of HTTP"))?;
        let headers = match &self.headers_file.value {
            None => Vec::new(),
            Some(file) if place.is_open() => {
                let why = format!("the headers in {} would be sent to another machine without TLS", file.display());
                return Err(bad(&format!("{why}: use https")));
            }
            Some(file) => headers(file, &self.headers_file.origin)?,
        };
        let (service, ratio) = (self.service.value.clone(), self.ratio.value);
        Ok(Some(Collector { place, target, service, ratio, headers }))
    }

    /// The address with its path, if there is one.
    fn address(&self) -> Result<Option<String>, Problem> {
        let text = self.endpoint.value.trim();
        if text.is_empty() {
            return Ok(None);
        }
        let bad = |why| wrong("endpoint", &self.endpoint.origin, why);
        let is_http = |uri: &Uri| matches!(uri.scheme_str(), Some("http" | "https")) && uri.authority().is_some();
        let uri = text.parse().ok().filter(is_http);
        let uri: Uri = uri.ok_or_else(|| bad("write http://host:4318 or https://host"))?;
        if uri.query().is_some() || uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
            return Err(bad("it has a user or a query: put what is secret into traces.headers_file"));
        }
        let base = text.trim_end_matches('/');
        Ok(Some(if uri.path().trim_end_matches('/').is_empty() { format!("{base}{PATH}") } else { base.into() }))
    }

    /// As they are printed.
    pub(crate) fn printed(&self) -> Vec<Printed> {
        let address = self.address().ok().flatten();
        let file = self.headers_file.value.as_deref();
        vec![
            Printed::new("traces.endpoint", json!(address), &self.endpoint.origin),
            Printed::new("traces.service", json!(self.service.value), &self.service.origin),
            Printed::new("traces.ratio", json!(self.ratio.value), &self.ratio.origin),
            Printed::path("traces.headers_file", file, &self.headers_file.origin),
        ]
    }
}

fn wrong(name: &str, origin: &Origin, why: &str) -> Problem {
    Problem::new(Exit::Usage, format!("traces.{name} ({origin}): {why}"))
}

/// A value of a variable that OpenTelemetry defines, unless it is empty.
fn of_environment(setting: Setting<String>, variable: &str, value: impl FnOnce(String) -> String) -> Setting<String> {
    let found = std::env::var(variable).ok().filter(|text| !text.trim().is_empty());
    setting.or(found.map(value), || Origin::Environment(variable.into()))
}

/// The headers in a file: `Name: value`, one a line. Empty lines and lines with `#` at the beginning are passed over.
fn headers(file: &Path, origin: &Origin) -> Result<Vec<(HeaderName, HeaderValue)>, Problem> {
    let name = file.display();
    let text = std::fs::read_to_string(file).map_err(|error| {
        let exit = if error.kind() == std::io::ErrorKind::NotFound { Exit::NotFound } else { Exit::Failed };
        Problem::new(exit, format!("traces.headers_file ({origin}): cannot read {name}: {error}"))
    })?;
    let mut all = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let read = line.split_once(':').and_then(|(name, value)| {
            let mut value = HeaderValue::from_str(value.trim()).ok()?;
            value.set_sensitive(true);
            Some((HeaderName::from_bytes(name.trim().as_bytes()).ok()?, value))
        });
        let bad = || wrong("headers_file", origin, &format!("{name}, line {}: write Name: value", index + 1));
        all.push(read.ok_or_else(bad)?);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(endpoint: &str, headers_file: Option<PathBuf>) -> TraceSettings {
        TraceSettings {
            endpoint: Setting::new(endpoint.into()),
            service: Setting::new(SERVICE.into()),
            ratio: Setting::new(0.5),
            headers_file: Setting::new(headers_file),
        }
    }

    #[test]
    fn an_address_without_a_path_gets_that_of_the_protocol() {
        for (given, address) in [
            ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
            ("http://127.0.0.1:4318/", "http://127.0.0.1:4318/v1/traces"),
            ("https://collector.example.org/otlp/v1/traces", "https://collector.example.org/otlp/v1/traces"),
        ] {
            assert_eq!(settings(given, None).address().ok().flatten().unwrap(), address);
        }
        assert!(settings(" ", None).collector().unwrap_or_else(|_| panic!("it is off")).is_none());
        for wrong in ["collector:4318", "ftp://h/", "http://me:hunter2@h/", "http://h/?key=hunter2", "http://", "h"] {
            let problem = settings(wrong, None).collector().err().unwrap();
            assert!(problem.message.starts_with("traces.endpoint (default): "), "{}", problem.message);
            assert!(!problem.message.contains("hunter2"), "{}", problem.message);
        }
    }

    #[test]
    fn headers_are_read_from_a_file_and_not_sent_in_the_clear() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("headers");
        std::fs::write(&file, "# of the vendor\n\nAuthorization: Bearer hunter2\nx-tenant:  a:b \n").unwrap();
        let collector = settings("http://localhost:4318", Some(file.clone())).collector().ok().flatten().unwrap();
        let shown: Vec<_> =
            collector.headers.iter().map(|(name, value)| format!("{name}={}", value.to_str().unwrap())).collect();
        assert_eq!(shown, ["authorization=Bearer hunter2", "x-tenant=a:b"]);
        let open = settings("http://collector:4318", Some(file.clone())).collector().err().unwrap();
        assert!(open.message.contains("without TLS"), "{}", open.message);
        assert!(settings("http://collector:4318", None).collector().is_ok());
        std::fs::write(&file, "x-a: b\nhunter2\n").unwrap();
        let bad = settings("http://localhost:4318", Some(file)).collector().err().unwrap();
        assert!(bad.message.contains(", line 2: write Name: value"), "{}", bad.message);
        assert!(!bad.message.contains("hunter2"), "{}", bad.message);
    }
}
