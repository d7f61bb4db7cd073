//! TLS of client connections.

use std::sync::Arc;

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};

use crate::settings::Tls;

type Error = Box<dyn std::error::Error + Send + Sync>;

/// Returns an acceptor of TLS handshakes that uses these files.
pub(crate) fn acceptor(tls: &Tls) -> Result<TlsAcceptor, Error> {
    let provider = Arc::new(ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions()?;
    let builder = match &tls.client_ca {
        None => builder.with_no_client_auth(),
        Some(file) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(file)? {
                roots.add(certificate)?;
            }
            builder.with_client_cert_verifier(WebPkiClientVerifier::builder_with_provider(roots.into(), provider).build()?)
        }
    };
    let mut config = builder.with_single_cert(certificates(&tls.certificate)?, PrivateKeyDer::from_pem_file(&tls.key)?)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

fn certificates(file: &str) -> Result<Vec<CertificateDer<'static>>, Error> {
    Ok(CertificateDer::pem_file_iter(file)?.collect::<Result<_, _>>()?)
}
