{{/* Fails unless the ports of all ranks differ: (dict "ranks" 4 "name" "relay.port" "port" 6557 "replayName" .. "replayPort" 6567). */}}
{{- define "kvevents.apart" -}}
{{- $distance := max (sub .port .replayPort) (sub .replayPort .port) -}}
{{- if lt $distance (int .ranks) -}}
{{- fail (printf "relay.ranks is %d, so %s and %s must be %d or more apart: they are %d and %d, and the ports of ranks are counted up from both" (int .ranks) .name .replayName (int .ranks) (int .port) (int .replayPort)) -}}
{{- end -}}
{{- end -}}

{{/*
A relay beside an engine, for `initContainers` of the engine's pod; one for each rank. It is a native sidecar: it listens before the
engine starts, and ends after it. Discovery knows it by the name of the container and of its ports, and follows it in place of the engine. The
pod needs the volume below too. From a chart of which this one is a dependency:

    initContainers:
      {{- include "kvevents.relay.container" (dict "root" .Subcharts.kvevents) | nindent 6 }}
    volumes:
      {{- include "kvevents.relay.volume" (dict "root" .Subcharts.kvevents) | nindent 6 }}
*/}}
{{- define "kvevents.relay.container" -}}
{{- $root := .root -}}
{{- $relay := $root.Values.relay -}}
{{- $ranks := int $relay.ranks -}}
{{- include "kvevents.apart" (dict "ranks" $ranks "name" "relay.port" "port" $relay.port "replayName" "relay.replayPort" "replayPort" $relay.replayPort) -}}
{{- include "kvevents.apart" (dict "ranks" $ranks "name" "relay.enginePort" "port" $relay.enginePort "replayName" "relay.engineReplayPort" "replayPort" $relay.engineReplayPort) -}}
{{- range $rank := until $ranks -}}
{{- $suffix := ternary "" (printf "-%d" $rank) (eq $rank 0) -}}
{{- if $rank }}
{{ end -}}
- name: kvevents-relay{{ if gt $ranks 1 }}-{{ $rank }}{{ end }}
  image: {{ include "kvevents.image" $root | quote }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  restartPolicy: Always
  args:
    - relay
    - {{ if $rank }}engine:{{ $rank }}={{ end }}tcp://127.0.0.1:{{ add $relay.enginePort $rank }},tcp://127.0.0.1:{{ add $relay.engineReplayPort $rank }}
    - --endpoint=tcp://0.0.0.0:{{ add $relay.port $rank }}
    - --replay=tcp://0.0.0.0:{{ add $relay.replayPort $rank }}
    - --heartbeat={{ $relay.heartbeatSeconds }}
    - --token-policy={{ $relay.tokenPolicy }}
    - --journal=/var/lib/kvevents/rank-{{ $rank }}
    - --metrics-host=0.0.0.0
    - --metrics-port={{ add 9465 $rank }}
    {{- with $relay.extraArgs }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- with $relay.extraEnv }}
  env: {{- toYaml . | nindent 4 }}
  {{- end }}
  ports:
    - {name: kv-events{{ $suffix }}, containerPort: {{ add $relay.port $rank }}}
    - {name: kv-replay{{ $suffix }}, containerPort: {{ add $relay.replayPort $rank }}}
    - {name: kv-metrics{{ $suffix }}, containerPort: {{ add 9465 $rank }}}
  # The engine starts when the relay has read its journal and listens. It has no readiness probe: the engine takes requests without it.
  startupProbe:
    httpGet: {path: /livez, port: kv-metrics{{ $suffix }}}
    periodSeconds: 2
    timeoutSeconds: 5
    failureThreshold: 60
  livenessProbe:
    httpGet: {path: /livez, port: kv-metrics{{ $suffix }}}
    periodSeconds: 20
    timeoutSeconds: 5
  resources: {{- toYaml $relay.resources | nindent 4 }}
  securityContext: {{- toYaml (merge (dict "runAsNonRoot" true "runAsUser" $root.Values.podSecurityContext.runAsUser) $root.Values.securityContext) | nindent 4 }}
  volumeMounts:
    - {name: kvevents-journal, mountPath: /var/lib/kvevents}
    {{- with $relay.extraVolumeMounts }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end -}}
{{- end -}}

{{/* The volume of the relays' journals, for `volumes` of the engine's pod. It outlives the containers, not the pod. */}}
{{- define "kvevents.relay.volume" -}}
- name: kvevents-journal
  emptyDir: {sizeLimit: {{ .root.Values.relay.journal }}}
{{- end -}}
