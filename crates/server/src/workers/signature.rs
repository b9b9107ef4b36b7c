//! Signatures of calls, as Standard Webhooks define them: HMAC-SHA256 over the id, the time and the body.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use latchwork::store::Timestamp;
use sha2::{Digest as _, Sha256};

use crate::workers::endpoint::EndpointError;

/// What signs calls. It is never printed.
pub(super) struct Secret(Hmac<Sha256>);

impl Secret {
    /// Reads secrets, one a line.
    pub(super) fn read_all(text: &str) -> Result<Vec<Secret>, EndpointError> {
        let secrets: Result<Vec<Secret>, EndpointError> =
            text.split_whitespace().map(|line| Secret::read(line).ok_or(EndpointError::Secret)).collect();
        secrets.and_then(|secrets| if secrets.is_empty() { Err(EndpointError::Secret) } else { Ok(secrets) })
    }

    fn read(text: &str) -> Option<Secret> {
        let bytes = STANDARD.decode(text.strip_prefix("whsec_")?).ok()?;
        let is_long_enough = (24..=64).contains(&bytes.len());
        is_long_enough.then(|| Hmac::new_from_slice(&bytes).ok().map(Secret)).flatten()
    }

    fn sign(&self, id: &str, seconds: u64, body: &[u8]) -> String {
        let mut mac = self.0.clone();
        mac.update(format!("{id}.{seconds}.").as_bytes());
        mac.update(body);
        format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes()))
    }
}

/// The headers that prove where a call comes from.
pub(super) struct SignedAs {
    /// The same for each attempt.
    pub(super) id: String,
    pub(super) timestamp: u64,
    pub(super) signature: Option<String>,
}

/// Signs a call with each of the secrets. The id stands for the idempotency key.
pub(super) fn sign(secrets: &[Secret], key: &str, now: Timestamp, body: &[u8]) -> SignedAs {
    let digest = Sha256::digest(key);
    let id: String = ["msg_".into()].into_iter().chain(digest[..16].iter().map(|byte| format!("{byte:02x}"))).collect();
    let timestamp = now.0 / 1_000_000;
    let signatures: Vec<String> = secrets.iter().map(|secret| secret.sign(&id, timestamp, body)).collect();
    SignedAs { id, timestamp, signature: Some(signatures.join(" ")).filter(|text| !text.is_empty()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_signature_is_that_of_the_published_example() {
        // The example of the reference libraries of Standard Webhooks.
        let secret = Secret::read("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").unwrap();
        let signed = secret.sign("msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, br#"{"test": 2432232314}"#);
        assert_eq!(signed, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }

    #[test]
    fn a_secret_has_a_prefix_and_a_length() {
        for wrong in ["", "whsec_", "whsec_YQ==", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_!!!"] {
            assert!(Secret::read_all(wrong).is_err(), "{wrong:?}");
        }
        let two = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\nwhsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA\n";
        let signed = sign(&Secret::read_all(two).unwrap(), "k", Timestamp(5_000_001), b"{}");
        assert_eq!((signed.signature.unwrap().split(' ').count(), signed.timestamp), (2, 5));
    }
}
