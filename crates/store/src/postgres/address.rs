//! The connection string, in both forms of PostgreSQL. What it says about TLS is taken out of it here, because the
//! client library knows only a part of that. No error repeats a part of the string: it may contain a password.

use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode, SslNegotiation};

use crate::postgres::tls::{Mode, Settings};
use crate::{Result, StoreError};

/// What else a connection string may contain.
const KNOWN: [&str; 18] = [
    "user",
    "password",
    "dbname",
    "options",
    "application_name",
    "sslnegotiation",
    "host",
    "hostaddr",
    "port",
    "connect_timeout",
    "tcp_user_timeout",
    "keepalives",
    "keepalives_idle",
    "keepalives_interval",
    "keepalives_retries",
    "target_session_attrs",
    "channel_binding",
    "load_balance_hosts",
];

/// Reads a connection string.
pub(super) fn read(text: &str) -> Result<(Config, Settings)> {
    let is_url = text.starts_with("postgres://") || text.starts_with("postgresql://");
    let mut settings = Settings::default();
    let rest = if is_url { take_from_url(text, &mut settings)? } else { take_from_pairs(text, &mut settings)? };
    let mut config: Config = rest.parse().map_err(|error| wrong(format!("{error}")))?;
    // A name is needed for the handshake, even if nothing compares it.
    if config.get_hosts().is_empty() {
        for address in config.get_hostaddrs().to_vec() {
            config.host(address.to_string());
        }
    }
    let is_local = |host: &Host| matches!(host, Host::Unix(_));
    let is_local = !config.get_hosts().is_empty() && config.get_hosts().iter().all(is_local);
    config.ssl_mode(match settings.mode {
        // PostgreSQL offers no TLS on a socket of the same machine, and `sslmode` does not count there.
        _ if is_local => SslMode::Disable,
        Mode::Disable => SslMode::Disable,
        Mode::Prefer => SslMode::Prefer,
        Mode::Require | Mode::VerifyCa | Mode::VerifyFull => SslMode::Require,
    });
    settings.is_direct = config.get_ssl_negotiation() == SslNegotiation::Direct;
    Ok((config, settings))
}

fn wrong(what: impl std::fmt::Display) -> StoreError {
    StoreError::Option { what: format!("the connection string of PostgreSQL: {what}") }
}

/// Takes what is about TLS. Gives whether the setting was that.
fn take(number: usize, key: &str, value: &str, settings: &mut Settings) -> Result<bool> {
    match key {
        "sslmode" => settings.mode = mode(value)?,
        "sslrootcert" => settings.root = Some(value.into()).filter(|file: &String| !file.is_empty()),
        "sslcert" => settings.certificate = Some(value.into()).filter(|file: &String| !file.is_empty()),
        "sslkey" => settings.key = Some(value.into()).filter(|file: &String| !file.is_empty()),
        key if KNOWN.contains(&key) => return Ok(false),
        // The name may be a part of a password that was not quoted.
        _ => return Err(wrong(format!("setting {number} is not known"))),
    }
    Ok(true)
}

fn mode(value: &str) -> Result<Mode> {
    Ok(match value {
        "disable" => Mode::Disable,
        "prefer" => Mode::Prefer,
        "require" => Mode::Require,
        "verify-ca" => Mode::VerifyCa,
        "verify-full" => Mode::VerifyFull,
        _ => return Err(wrong("sslmode is disable, prefer, require, verify-ca or verify-full")),
    })
}

fn take_from_url(text: &str, settings: &mut Settings) -> Result<String> {
    // A password may contain a question mark.
    let after = text.find('@').unwrap_or_default();
    let Some(at) = text[after..].find('?').map(|at| after + at) else { return Ok(text.into()) };
    let (base, query) = (&text[..at], &text[at + 1..]);
    let mut left = Vec::new();
    for (number, pair) in (1..).zip(query.split('&').filter(|pair| !pair.is_empty())) {
        let (key, value) = pair.split_once('=').ok_or_else(|| wrong(format!("setting {number} has no value")))?;
        let (key, value) = (decoded(key)?, decoded(value)?);
        if !take(number, &key, &value, settings)? {
            left.push(pair);
        }
    }
    Ok(if left.is_empty() { base.into() } else { format!("{base}?{}", left.join("&")) })
}

/// Replaces `%2F` and the like.
fn decoded(text: &str) -> Result<String> {
    let (mut bytes, mut rest) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let [first, more @ ..] = rest {
        rest = more;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let code = more.get(..2).and_then(|code| std::str::from_utf8(code).ok());
        let byte = code.and_then(|code| u8::from_str_radix(code, 16).ok());
        bytes.push(byte.ok_or_else(|| wrong("a percent sign is not followed by two hexadecimal digits"))?);
        rest = &more[2..];
    }
    String::from_utf8(bytes).map_err(|_| wrong("it is not UTF-8"))
}

fn take_from_pairs(text: &str, settings: &mut Settings) -> Result<String> {
    let (mut left, mut rest) = (String::new(), text.trim_start());
    for number in 1.. {
        if rest.is_empty() {
            break;
        }
        let (key, after) = rest.split_once('=').ok_or_else(|| wrong(format!("setting {number} has no value")))?;
        let (value, after) = value(after.trim_start(), number)?;
        rest = after.trim_start();
        let key = key.trim_end();
        if !take(number, key, &value, settings)? {
            let value = value.replace('\\', "\\\\").replace('\'', "\\'");
            left.push_str(&format!("{key}='{value}' "));
        }
    }
    Ok(left)
}

/// A value, in single quotes if it contains spaces; a backslash takes the next character as it is.
fn value(text: &str, number: usize) -> Result<(String, &str)> {
    let (quoted, text) = match text.strip_prefix('\'') {
        Some(text) => (true, text),
        None => (false, text),
    };
    let (mut value, mut letters) = (String::new(), text.char_indices());
    while let Some((at, letter)) = letters.next() {
        match letter {
            '\\' => value.extend(letters.next().map(|(_, letter)| letter)),
            '\'' if quoted => return Ok((value, &text[at + 1..])),
            letter if !quoted && letter.is_whitespace() => return Ok((value, &text[at..])),
            letter => value.push(letter),
        }
    }
    if quoted { Err(wrong(format!("the quotes of setting {number} do not end"))) } else { Ok((value, "")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_about_tls_is_taken_from_both_forms() {
        for text in [
            "postgres://me:p%3Fw@db:5433/app?sslmode=verify-full&sslrootcert=%2Fetc%2Froot.pem&connect_timeout=3",
            "host=db port = 5433 user=me password='p?w' dbname=app sslmode=verify-full \
             sslrootcert='/etc/root.pem' connect_timeout=3",
        ] {
            let (config, settings) = read(text).unwrap();
            assert_eq!(settings.mode, Mode::VerifyFull, "{text}");
            assert_eq!(settings.root.as_deref(), Some("/etc/root.pem"));
            assert_eq!(config.get_password(), Some(&b"p?w"[..]));
            assert_eq!((config.get_user(), config.get_dbname()), (Some("me"), Some("app")));
            assert_eq!((config.get_ports(), config.get_ssl_mode()), (&[5433][..], SslMode::Require));
            assert_eq!(config.get_connect_timeout().map(|timeout| timeout.as_secs()), Some(3));
        }
        let (config, _) = read(r"host=db password='it\'s a \\ secret'").unwrap();
        assert_eq!(config.get_password(), Some(&br"it's a \ secret"[..]));
        let (config, settings) = read("host=/run/postgresql sslmode=verify-full").unwrap();
        assert_eq!((config.get_ssl_mode(), settings.mode), (SslMode::Disable, Mode::VerifyFull), "a local socket");
        let (config, _) = read("hostaddr=127.0.0.1 user=me sslmode=require").unwrap();
        assert_eq!(config.get_hosts(), [Host::Tcp("127.0.0.1".into())]);
    }

    #[test]
    fn no_error_repeats_a_part_of_the_string() {
        for (text, says) in [
            ("postgres://me:hunter2@db/app?sslmode=allow", "sslmode is"),
            ("postgres://me:hunter2@db/app?sslcrl=hunter2", "setting 1 is not known"),
            ("postgres://me:hunter2@db/app?port", "setting 1 has no value"),
            ("postgres://me:hunter2@db/app?host=%zz", "percent sign"),
            ("postgres://me:hunter2@db:port/app", "connection string"),
            ("host=db password=a hunter2=b", "setting 3 is not known"),
            ("host=db password='hunter2", "quotes of setting 2"),
            ("host=db password=hunter2 port=many", "connection string"),
            ("hunter2", "setting 1 has no value"),
        ] {
            let error = read(text).expect_err(text);
            assert!(matches!(error, StoreError::Option { .. }), "{text}: {error:?}");
            let said = error.to_string();
            assert!(said.contains(says) && !said.contains("hunter2"), "{text}: {said}");
        }
    }
}
